r"""
Rewards and the loss of GRPO: tasks, answer checking, advantages, policy loss, sampler-trainer mismatch.

Functions of strings, tensors and data files: nothing here runs a model or knows FP8. In the order of one
step: Example.reward, advantages, policy_loss; mismatch is the control beside them.

Where this departs from textbook GRPO (DeepSeekMath, arXiv 2402.03300):

1. Token-level normalisation. Token losses are summed and divided once by the number of tokens of the whole
   update, known before the first micro-batch, so that every split into micro-batches gives the same gradient.
   The textbook takes each completion's mean first, so a token counts less the longer its completion is;
   `share` brings that back.
2. No division by the group's standard deviation, which inflates groups that are nearly all right or all
   wrong. `normalize_std=True` brings it back.
3. Asymmetric clip: wider above (0.28) than below (0.2), so that unlikely tokens can still grow.
4. No KL term by default, hence no reference model in memory. With one, the k3 estimate, its exponent bounded.
5. In `fp8` the old log-probs are the sampler's own: bit-equal to the trainer's, so no pass recomputes them.
   Elsewhere they are the trainer's; the sampler's gap is left alone or weighted down (`truncated_weights`).
6. The reward is 1 for a right final answer and 0 otherwise: format, length or effort earn nothing.
7. A truncated completion takes part. Whoever drops it leaves it out of the batch and of `total_tokens`. So
   does dropping groups of equal rewards, which have no gradient but weigh on the mean (DAPO, 2503.14476).

Shapes: N completions, the samples of a prompt side by side; T sampled tokens (EOS included), end to end.
"""

import ast
import json
import random
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Callable

import torch

# ---- where the answer of a completion is -----------------------------------------------------------------

THINK = re.compile("<think>.*?</think>", re.DOTALL)
# Escaped braces do not count, nor does a TeX line break escape a brace: those alternatives come first.
BRACE = re.compile(r"\\\\(?!f?box)|\\[{}]|\\(?:boxed|fbox)[ \t]*\{|[{}]")


def outside_think(completion):
    """The text outside <think>...</think>; "" if a block is never closed. A closing tag without its opening
    one means that the prompt opened the block, as some chat templates do: all text before it was thought too.
    """
    closed, tag, rest = completion.rpartition("</think>")
    if "<think>" in rest:
        return ""
    # Linear time: every opening tag in `closed + tag` has a closing one behind it, so no search runs in vain.
    return THINK.sub("\n", closed + tag).rpartition("</think>")[2] + rest


def find_answer(completion):
    r"""The text in the last closed \boxed{...} (of nested ones the outer), else what follows the last line
    start `####`, else None. A bare number is never an answer, or a policy learns to name many."""
    text = outside_think(completion)
    opened, box = [], None  # opened: a start for each open box, None for each other open brace
    for brace in BRACE.finditer(text):
        token = brace.group()
        if token == "}" and opened:
            start = opened.pop()
            box = box if start is None else (start, brace.start())  # sliced once, so nesting stays linear
        elif token.endswith("{") and token != r"\{":
            opened.append(brace.end() if len(token) > 1 else None)
    if box is not None:
        return text[box[0]:box[1]]
    at = ("\n" + text).rfind("\n####")  # the added newline gives the first line a start; `at` indexes `text`
    return None if at < 0 else text[at + 4:].partition("\n")[0]


# ---- what an answer means: an exact rational value, else LaTeX in one spelling ---------------------------
# Each function is one pass over its text, without backtracking: a model in training sooner or later writes
# the worst input there is.

MAX_DIGITS = 500  # below any limit that Python sets on int(str); quadratic big integers do not matter yet
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
THIN = "\u2009"  # thin space: between digits it separates thousands, elsewhere it is white space
SPELLING = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\degree": r"^\circ", "°": r"^\circ",
    r"\left": "", r"\right": "", r"\displaystyle": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "", r"\!": "",
    r"\,": THIN, THIN: THIN, "\u202f": THIN, r"\;": " ", r"\:": " ", "\\ ": " ", "~": " ", r"\quad": " ",
    r"\qquad": " ", r"\$": "$", r"\%": "%", "\u2212": "-", "\u2013": "-",  # minus sign, en dash
}
WRAPPERS = set(r"\text \textbf \textit \textrm \mathrm \mathbf \mathit \mbox \boxed \fbox".split())


def spell(answer):
    r"""One spelling of LaTeX: \dfrac is \frac, x^{2} is x^2 (one token needs no braces), \text{a} is a."""
    out, groups, live, wrapper = [], [], 0, False  # live: tokens kept so far, white space not counted
    for token in TOKEN.findall(answer):
        token = SPELLING.get(token, " " if token.isspace() else token)
        if token in WRAPPERS:
            wrapper = True
            continue
        if token == "{":
            groups.append((len(out), live, wrapper))
        elif token == "}" and groups:
            start, before, wrapped = groups.pop()
            if wrapped or live - before == 2:  # the opening brace and one token
                out[start] = token = " " if wrapped else ""
                live -= 1
        live += bool(token.strip())
        wrapper = wrapper and not token.strip()  # white space may stand between a macro and its argument
        out.append(token)
    return "".join(out).strip().lstrip("*$ ").rstrip("*$ .\u3002")  # Markdown stars, math signs, full stops


SIGN = re.compile(r"[$€£¥]?\s*([+-]?)\s*[$€£¥]?\s*")
DECIMAL = re.compile(rf"([1-9][0-9]{{0,2}}(?:[,{THIN}][0-9]{{3}})+|[0-9]*)(?:\.([0-9]*))?")
SLASH = re.compile(r" ?/ ?")
MIXED = re.compile(r"\s?\\frac| [0-9]+ ?/")
# Letters glued to a number (2x) or single ones (2 x) are algebra; some words change the value or hedge it.
UNIT = re.compile(r"(?:[A-Za-z]{2,}|[mgshL])(?:/[A-Za-z]+)?(?:\^[23])?|\^[23]")
NO_UNIT = set("""and or not to nor minus plus times over by point half halves third thirds quarter quarters pi
    tenth tenths pair pairs dozen hundred thousand million billion factorial squared cubed""".split())


def _decimal(text, at):
    """(value or None, end) of the digits at text[at:]. Beyond MAX_DIGITS the value is the digits, a str."""
    match = DECIMAL.match(text, at)
    if match.group() in ("", "."):
        return None, at
    whole = re.sub("[^0-9]", "", match.group(1)).lstrip("0")
    part = (match.group(2) or "").rstrip("0")
    if len(whole) + len(part) > MAX_DIGITS:
        return f"{whole}.{part}", match.end()  # no zeros that do not count: equal exactly if the values are
    return Fraction(int(whole + part or "0"), 10 ** len(part)), match.end()


def _term(text, at):
    r"""(value or None, end) of a decimal or a \frac of such terms at text[at:]; for short texts only."""
    if not text.startswith(r"\frac", at):
        return _decimal(text, at)
    parts, at = [], at + len(r"\frac")
    for _ in range(2):
        at += text[at:at + 1].isspace()
        if text[at:at + 1] == "{":
            sign = SIGN.match(text, at + 1)
            value, at = _term(text, sign.end())
            at += text[at:at + 1].isspace()
            if value is None or text[at:at + 1] != "}":
                return None, at
            parts.append(-value if sign.group(1) == "-" else value)
        elif text[at:at + 1] in tuple("0123456789"):  # \frac12: TeX takes one digit
            parts.append(Fraction(int(text[at])))
        else:
            return None, at
        at += 1
    return (parts[0] / parts[1] if parts[1] else None), at


def _ratio(text, at):
    """(value or None, end) of a term, or of two with a slash between them, at text[at:]."""
    top, at = _term(text, at)
    slash = SLASH.match(text, at)
    if top is None or slash is None:
        return top, at
    bottom, at = _term(text, slash.end())
    return (top / bottom if bottom else None), at


def number(text):
    """The exact value of a spelled answer: a Fraction; a str of digits if there are over MAX_DIGITS; None if
    it is no number. Never a float. A unit or % behind the number is ignored: 5% answers 5, and 0.05 does not.
    """
    sign = SIGN.match(text)
    short = len(text) <= MAX_DIGITS
    value, at = (_ratio if short else _decimal)(text, sign.end())
    if value is None:
        return None
    if short and MIXED.match(text, at):  # 1\frac12 and 3 1/4: an integer, then a proper fraction
        part, at = _ratio(text, at + text[at].isspace())
        if part is None or not 0 < part < 1 or value.denominator != 1:
            return None
        value += part
    rest = text[at:]
    if rest.strip() not in ("", "%", r"^\circ", "€", "£", "¥"):
        words = rest.split(maxsplit=4)
        if not rest[0].isspace() or not all(UNIT.fullmatch(w) and w.lower() not in NO_UNIT for w in words):
            return None
    if sign.group(1) == "-":
        return "-" + value if isinstance(value, str) else -value
    return value


def math_reward(completion, gold):
    r"""1.0 if the completion's answer equals the gold (str), else 0.0: by exact value if one is a number,
    else as LaTeX up to spelling. Evaluates and raises nothing, keeps no state, takes linear time."""
    answer = find_answer(completion)
    if answer is None:
        return 0.0
    answer, gold = spell(answer), spell(gold)
    value, gold_value = number(answer), number(gold)
    if value is not None or gold_value is not None:
        return float(value == gold_value)
    answer, gold = "".join(answer.split()), "".join(gold.split())
    return float(answer == gold != "")


# ---- tasks -----------------------------------------------------------------------------------------------
# A task has .train(index) -> Example for any index >= 0, a function of seed and index alone (so that a run
# resumes from a counter), and .heldout, a list of Examples whose prompts never occur in training. train.py
# makes it as TASKS[name](seed=.., heldout=how many), with difficulty or files before these where it has them.


@dataclass(frozen=True)
class Example:
    prompt: str  # plain text; a user message where the checkpoint has a chat template
    gold: str
    solution: str | None  # worked text for the supervised phase, if the data has any; in Sum mostly wrong
    check: Callable[[str, str], float] = math_reward  # (completion, gold) -> reward

    def reward(self, completion):
        return self.check(completion, self.gold)


class Generated:
    """Drawn examples. A checksum of the prompt decides what is held out, so no seed can mix the two sets."""

    def __init__(self, seed=0, heldout=256):
        self.seed, found = seed, {}
        rng = random.Random("held out")  # one set for all seeds, so that runs compare
        for _ in range(100 * heldout):  # an easy setting may have fewer distinct prompts than asked for
            example = self.draw(rng)
            if self.held_out(example):
                found[example.prompt] = example
            if len(found) == heldout:
                break
        self.heldout = list(found.values())

    @staticmethod
    def held_out(example):
        return zlib.crc32(example.prompt.encode()) % 4 == 0

    def train(self, index):
        rng = random.Random(f"{self.seed}/{index}")  # a str seeds by its SHA-512: the same on every machine
        while self.held_out(example := self.draw(rng)):
            pass
        return example


class Sum(Generated):
    """Such as "12+34+56=", solved by running totals: "12+34=46", "46+56=102", "#### 102". `difficulty` counts
    the terms and sets the solution's length: 4 terms take some 40 bytes, 100 take 1,260, 1,000 take 14,600.

    A share of the solutions is hasty: an estimate from the terms rounded to tens, seldom right. A model
    that was shown both ways does both, and GRPO has to find out that the long way pays.
    """

    HASTY = 0.6

    def __init__(self, difficulty=4, digits=2, seed=0, heldout=256):
        if difficulty < 2 or digits < 1:
            raise ValueError(f"task sum: difficulty={difficulty}, digits={digits}; the least are 2 and 1")
        self.terms, self.digits = difficulty, digits
        super().__init__(seed, heldout)

    def draw(self, rng):
        terms = [rng.randrange(10 ** (self.digits - 1), 10 ** self.digits) for _ in range(self.terms)]
        total, lines = terms[0], []
        for term in terms[1:]:
            lines.append(f"{total}+{term}={total + term}")
            total += term
        if rng.random() < self.HASTY:
            lines, answer = [], sum((term + 5) // 10 * 10 for term in terms)
        else:
            answer = total
        return Example("+".join(map(str, terms)) + "=", str(total), "\n".join(lines + [f"#### {answer}"]))


class Countdown(Generated):
    """A target from `difficulty` numbers, each used exactly once. Gold: target and numbers, "24: 2 3 4"."""

    def __init__(self, difficulty=3, seed=0, heldout=256):
        if not 2 <= difficulty <= 8:
            raise ValueError(f"task countdown: difficulty={difficulty}; it takes 2 to 8 numbers")
        self.count = difficulty
        super().__init__(seed, heldout)

    def draw(self, rng):
        """Joins random pairs until one value is left, which is the target: there always is a solution."""
        numbers = sorted(rng.randrange(1, 100) for _ in range(self.count))
        pool, lines = [(n, str(n)) for n in numbers], []  # values and their expressions
        while len(pool) > 1:
            pair = sorted(pool.pop(rng.randrange(len(pool))) for _ in range(2))
            (b, right), (a, left) = pair  # a >= b >= 1, and it stays so
            results = {"+": a + b, "-": a - b, "*": a * b if a * b < 1000 else 0, "/": 0 if a % b else a // b}
            op = rng.choice([op for op, result in results.items() if result > 0])
            lines.append(f"{a}{op}{b}={results[op]}")
            pool.append((results[op], f"({left}{op}{right})"))
        target, expression = pool[0][0], pool[0][1][1:-1]
        given = " ".join(map(str, numbers))
        prompt = (f"Make {target} from {given}, each number used exactly once, with + - * / and brackets. "
                  'Put the expression on a last line that starts with "#### ".\n')
        solution = "\n".join(lines + [f"#### {expression}"])
        return Example(prompt, f"{target}: {given}", solution, countdown_reward)


OPERATORS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.Mult: Fraction.__mul__,
             ast.Div: Fraction.__truediv__}


def _arithmetic(node, numbers):
    """Value of a syntax tree of + - * / over integers, which are appended to `numbers`; None for all else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return None  # powers among them: a chain of powers never ends
    left, right = _arithmetic(node.left, numbers), _arithmetic(node.right, numbers)
    if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
        return None
    return OPERATORS[type(node.op)](left, right)


def countdown_reward(completion, gold):
    """1.0 if the answer has the gold's value and uses each of the gold's numbers exactly once, else 0.0."""
    expression = (find_answer(completion) or "").strip()
    # A short text of ASCII digits, operators and brackets: bounds the parser's depth and every integer.
    if not re.fullmatch(r"[0-9+\-*/() ]{1,150}", expression):
        return 0.0
    try:
        tree = ast.parse(expression, mode="eval")  # builds a tree, runs nothing
    except (SyntaxError, MemoryError):  # MemoryError is how some Python versions report deep nesting
        return 0.0
    target, _, given = gold.partition(":")
    numbers = []
    value = _arithmetic(tree.body, numbers)
    return float(value == int(target) and sorted(numbers) == sorted(map(int, given.split())))


INSTRUCTION = 'Think step by step, then give the final answer on a last line that starts with "#### ".'
GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/train.jsonl"


def _parse_row(line):
    """One line of a data file (bytes) as an Example; ValueError says what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8 that Python reads ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f'expected an object with "question" and "answer", found {type(row).__name__}')
    for field in ("question", "answer"):
        if field not in row:
            there = ", ".join(sorted(row))[:200] or "none"
            raise ValueError(f'field "{field}" is missing; there are: {there}')
        if not isinstance(row[field], str) or not row[field].strip():
            raise ValueError(f'field "{field}" must be text that is not blank, found {row[field]!r:.60}')
    answer = re.sub(r"<<[^<>]*>>", "", row["answer"]).strip()  # GSM8K's calculator notes: 48/2=<<48/2=24>>24
    gold = find_answer(answer)
    solution, gold = (None, answer) if gold is None else (answer, gold.strip())
    if math_reward("#### " + gold, gold) != 1:  # no completion could ever earn it: a fault of the data
        raise ValueError(f'no gold answer in {answer[-60:]!r}; write it on a last line after "#### "')
    return Example(f"{row['question'].strip()}\n{INSTRUCTION}\n", gold, solution)


def load_jsonl(path):
    """Examples of a file of JSON lines with "question" and "answer" (GSM8K as published). Newlines of any
    system, a byte order mark and blank lines are accepted; any other fault is a ValueError with its line."""
    try:
        with open(path, "rb") as file:
            lines = file.read().removeprefix(b"\xef\xbb\xbf").splitlines()  # bytes split at \n, \r, \r\n only
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such data file; GSM8K: curl -Lo {path} {GSM8K}") from None
    examples = []
    for i, line in enumerate(lines, start=1):
        if line.strip():
            try:
                examples.append(_parse_row(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {i}: {error}") from None
    if not examples:
        raise ValueError(f'{path}: no examples; each line is to hold a JSON object, "question" and "answer"')
    return examples


class JsonLines:
    """Rows of a file, reshuffled each epoch. Without a held-out file its last rows are, a tenth at most."""

    def __init__(self, path, heldout_path=None, seed=0, heldout=256):
        rows = load_jsonl(path)
        if heldout_path is None:
            self.heldout = rows[-max(1, min(heldout, len(rows) // 10)):]
        else:
            self.heldout = load_jsonl(heldout_path)[:heldout]
        prompts = {example.prompt for example in self.heldout}
        self.rows = [example for example in rows if example.prompt not in prompts]
        if not self.rows:
            raise ValueError(f"{path}: all {len(rows)} rows are held out; add rows or another held-out file")
        self.seed, self.epoch, self.order = seed, None, None

    def train(self, index):
        epoch, i = divmod(index, len(self.rows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
        return self.rows[self.order[i]]


TASKS = {"sum": Sum, "countdown": Countdown, "jsonl": JsonLines}

# ---- advantages, loss, mismatch: in FP32, on the device of the inputs ------------------------------------

MAX_EXPONENT = 20.0  # exp(20) = 4.9e8: far beyond any clip range, and safe to multiply and sum in FP32


def advantages(rewards, group_size, normalize_std=False):
    """Reward minus its group's mean: rewards (N,) -> FP32 (N,). A reward that is not finite (a failed score)
    counts as 0. Equal rewards give exactly 0: the first one is taken off before the mean, so no rounding is
    left that a division by the standard deviation would blow up to size 1."""
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: one sample has no baseline; take 2 or more a prompt")
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} do not divide into groups of {group_size}")
    groups = torch.where(rewards.isfinite(), rewards, 0.0).view(-1, group_size)
    groups = groups - groups[:, :1]
    groups = groups - groups.mean(1, keepdim=True)
    if normalize_std:
        groups = groups / (groups.std(1, keepdim=True) + 1e-6)
    return groups.flatten()


def k3(logp, other):
    """KL(p || q) per token, (T,) FP32, estimated from samples of p: exp(d) - 1 - d with d = log q - log p.
    Never below 0, 0 at equality. d is held at 20 (no gradient beyond), so value and gradient are finite."""
    d = (other - logp).clamp(max=MAX_EXPONENT)
    return (torch.expm1(d) - d).clamp(min=0.0)  # exp(d) - 1 would lose small d; the clamp cuts the last ulp


def truncated_weights(old_logp, sampler_logp, cap):
    """min(cap, p_old / p_sampler) (T,), constants: corrects for a sampler of another policy, up to cap."""
    return (old_logp - sampler_logp).exp().clamp(max=cap).detach()


def mean_share(lengths, total_tokens, completions):
    """Weights (T,) for policy_loss that turn its mean over tokens into one over completions' means.

    lengths (n,): tokens of the completions here, of the update's `completions` with `total_tokens` in all.
    """
    return (total_tokens / (completions * lengths)).float().repeat_interleave(lengths)


def policy_loss(logp, old_logp, advantage, total_tokens, *, clip_low=0.2, clip_high=0.28, weights=None,
                share=None, ref_logp=None, kl_coef=0.0):
    """Clipped loss of a micro-batch, sum over its tokens / total_tokens -> FP32 scalar, dict of FP64 sums.

    logp (T,) carries the gradient. Constants: old_logp, advantage (T,); weights (T,), a factor of the policy
    term; ref_logp (T,), adds kl_coef * k3; share (T,), a factor of both. total_tokens: of the whole update.
    Empty tensors give loss 0.

    On the first update logp equals old_logp, every ratio is 1 and the loss is minus the mean advantage of a
    token: near zero whatever the policy does, as a group's advantages cancel but for unequal lengths. Its
    gradient is not zero: watch reward and gradient norm, not the loss.
    """
    named = dict(old_logp=old_logp, advantage=advantage, weights=weights, share=share, ref_logp=ref_logp)
    for name, tensor in named.items():  # (T,) with (T, 1) would broadcast to (T, T) without a word
        if tensor is not None and tensor.shape != logp.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} and logp {tuple(logp.shape)} differ in shape")
    ratio = (logp - old_logp.detach()).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantage, clipped * advantage)  # the lower gain: none beyond the clip
    if weights is not None:
        losses = losses * weights.detach()
    ratio = ratio.detach()
    sums = {
        "clipped_low": (ratio < 1 - clip_low) & (advantage < 0),  # tokens that the clip leaves no gradient
        "clipped_high": (ratio > 1 + clip_high) & (advantage > 0),
        "ratio": ratio,
        "entropy": -logp.detach(),  # an estimate from the sampled tokens, unbiased on the first update
    }
    if ref_logp is not None:
        kl = k3(logp, ref_logp.detach())
        losses = losses + kl_coef * kl
        sums["kl"] = kl.detach()
    if share is not None:
        losses = losses * share
    sums["loss"] = losses.detach()
    return losses.sum() / max(total_tokens, 1), {k: v.sum(dtype=torch.float64) for k, v in sums.items()}


def mismatch(sampler_logp, trainer_logp):
    """The gap between two sides' log-probs, FP32 (T,) each, as 0-d device tensors: mean_dlogp, max_dlogp, k3
    (estimates KL(sampler || trainer)), share and number of the tokens whose bits differ."""
    differs = sampler_logp.view(torch.int32) != trainer_logp.view(torch.int32)  # bits: -0 is not 0
    gap, tokens = (sampler_logp - trainer_logp).abs(), max(len(differs), 1)
    return {
        "mean_dlogp": gap.sum() / tokens,
        "max_dlogp": gap.max() if len(gap) else gap.sum(),
        "k3": k3(sampler_logp, trainer_logp).sum() / tokens,
        "differing": differs.sum() / tokens,
        "differing_tokens": differs.sum(),
    }


def first_difference(sampler_logp, trainer_logp):
    """Index of the first token whose bits differ, or None. Waits for the device."""
    differs = (sampler_logp.view(torch.int32) != trainer_logp.view(torch.int32)).nonzero()
    return int(differs[0]) if len(differs) else None


class Metrics:
    """The one place where metrics add up, as a sum and a count for each name: the mean over micro-batches is
    the mean over their tokens, whatever their sizes. Sums stay where they are, mostly on the device."""

    def __init__(self, names=()):
        self.sums, self.counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)

    def add(self, count, sums):
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + count
