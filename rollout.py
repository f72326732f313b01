"""
Sampling: n completions for each of many prompts, at the speed of an engine, in one file.

Everything random of this repository happens here: the paged KV cache, continuous batching, CUDA graphs and the
draw of the tokens. Nothing here knows about rewards or gradients.

    python rollout.py --model=FOLDER --prompt="What is 17 * 23?"

How a rollout runs, from the inside out:

1. `Sampler._step` is one decode step for B rows, wholly on the device: current tokens in; next tokens, their
   log-probs and the stop test out. It touches tensors of fixed address only, so on a GPU it is captured once for a
   batch size in a CUDA graph and replayed. On a CPU the same function runs eagerly.
2. The host launches a few steps (STEPS_PER_LOOK), then *looks* once, the only synchronisation: it harvests tokens,
   frees the pages of what has finished, reserves pages for the next steps, admits waiting sequences into free rows
   (prefill) and uploads who sits in which row. A row may change hands at every look, so as a rollout drains, what is
   left simply moves together into a smaller graph.
3. A prompt without its last token is prefilled by the packed training pass, once for its n samples. The last prompt
   token is the first current token: the first sampled token comes out of the same step as all others.

None of this may show in the result. By the numerics contract (fp8.py) a log-probability depends on the tokens before
it alone, and the noise of a sample on (seed, key, position) alone: rows, order, batch size, preemption, page sharing
and graphs change no bit of tokens, log-probs or pages. There is no top-k or top-p: what is sampled is what is scored.

Shapes: B rows of a step, S rows at most (slots), W pages of the longest sequence, P pages of the pool, G key/value
heads, D head size, L layers, T packed tokens, C hidden size, V vocabulary.
"""

import argparse
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from model import PAGE, Tokenizer, Transformer, sample

STEPS_PER_LOOK = 8        # decode steps between two looks: a finished row idles for half of them on average
PREFILL_TOKENS = 8192     # packed tokens of one prefill call; only a longer single sequence exceeds it
GROWTH_PAGES = 2          # free pages left to each running sequence when another one is admitted
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512)   # rows of the captured graphs: each costs a capture, empty rows cost little
MAX_SLOTS = {"cuda": 512, "cpu": 64}          # the CPU reference multiplies blocks of 64 rows, full or not


@dataclass
class Rollout:
    """What `Sampler.generate` returns: one entry per completion, the n completions of a prompt side by side.

    tokens      lists of ids, the stop id included (it is an action: it is scored and trained like any other)
    logprobs    FP32 CPU tensors, log p(token) at the sampling temperature (greedy: at temperature 1)
    finish      "stop" (last token is a stop id, also when it is the last one allowed) or "length"
    occupancy   mean share of the slots that held a running sequence, over all decode steps
    """
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish: list = field(default_factory=list)
    seconds: float = 0.0
    n_tokens: int = 0
    steps: int = 0
    occupancy: float = 0.0
    prefill_tokens: int = 0
    preemptions: int = 0

    @property
    def tok_per_s(self):
        return self.n_tokens / max(self.seconds, 1e-9)


def pages_for(positions):
    """Number of pages that hold so many positions."""
    return -(-positions // PAGE)


class PagePool:
    """The KV cache: P pages of PAGE positions, handed out by number, with reference counts.

    A page number means the same page in all L layers: k_pages[l], v_pages[l] are (P, G, PAGE, D). A page is one tile
    of the attention kernel, so paging cannot change the order of its sums. Page 0 belongs to nobody: rows without a
    running sequence write there. A page that changes hands keeps its old content; attention masks it.
    """

    def __init__(self, config, pages, dtype, device):
        shape = (pages, config.num_key_value_heads, PAGE, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.k_pages = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.v_pages = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.capacity = pages - 1
        self.reset()

    def reset(self):
        """Forget all sequences. Every `generate` starts so: no page of older weights survives it."""
        self.references = [0] * (self.capacity + 1)
        self.free_pages = list(range(self.capacity, 0, -1))  # a stack: low numbers first

    @property
    def free(self):
        return len(self.free_pages)

    def take(self, count):
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages):
        for page in pages:
            self.references[page] += 1
        return list(pages)

    def release(self, pages):
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free_pages.append(page)

    def copy(self, pairs):
        """Copies whole pages, [(source, destination), ...], in every layer."""
        source, destination = torch.tensor(pairs, device=self.k_pages[0].device).unbind(1)
        for pages in self.k_pages + self.v_pages:
            pages[destination] = pages[source]


@dataclass(eq=False)
class _Prefix:
    """Tokens to prefill: all but the last of a prompt, for its samples to share, or of what a preempted one had."""
    tokens: list
    waiting: int          # sequences in the queue that will start from it
    pages: list = None    # held for them, once filled


@dataclass(eq=False)
class _Sequence:
    """One completion on its way. Positions count from the first prompt token."""
    index: int            # place in the result
    prompt: list
    prefix: _Prefix
    key: int              # names the completion for the noise
    limit: int            # max_new_tokens
    tokens: np.ndarray    # (limit,) int32, the first `count` are generated
    logprobs: np.ndarray  # (limit,) FP32
    count: int = 0
    pages: list = None    # None while it waits
    row: int = -1
    age: int = -1         # number of its admission: the largest is the youngest

    @property
    def position(self):   # of the current token, which the next step feeds
        return len(self.prompt) + self.count - 1

    @property
    def end(self):        # first position that is never fed: the last token is sampled at end - 1
        return len(self.prompt) + self.limit - 1

    @property
    def current(self):
        return int(self.tokens[self.count - 1]) if self.count else self.prompt[-1]


class Sampler:
    """Samples from a `Transformer`, whose weights may be rewritten in place between two calls of `generate`.

    Slots and pages follow from the request and from free memory, unless given: max_slots bounds the sequences that
    run at once, pages the KV pages. All is kept from call to call until `release()` hands the memory to the trainer.
    """

    def __init__(self, model, max_slots=None, pages=None, memory_fraction=0.9, verbose=False):
        self.model, self.device = model, model.head.data.device
        self.max_slots, self.max_pages = max_slots, pages
        self.memory_fraction, self.verbose = memory_fraction, verbose
        self.pool, self.slots, self.width, self.graphs = None, 0, 0, {}

    # ---- one decode step: everything the device does -------------------------------------------------------

    def _step(self, B):
        """One token for the first B rows. Only tensors of fixed address: a CUDA graph holds the whole function.

        A row runs while position < end. The others go through the same arithmetic with length 0, write to page 0
        and change nothing; -1 marks their token. The host sees at its next look who has stopped.
        """
        current, keys, count = self.ids[0, :B], self.ids[1, :B], self.ids[2, :1]        # (B,) twice, (1,) int64
        position, end, table = self.spans[0, :B], self.spans[1, :B], self.table[:B]     # (B,) twice, (B, W) int32
        running = position < end
        length = torch.where(running, position + 1, 0)                 # the current token counts
        at = torch.where(running, position, 0)
        page = table.gather(1, (at // PAGE)[:, None].long())[:, 0]
        slot = torch.where(running, page * PAGE + at % PAGE, 0).long()
        hidden = self.model.decode(current, at, self.pool.k_pages, self.pool.v_pages, table, length, slot)
        token, logprob = sample(hidden, self.model.head, self.inv_temp, self.noise, self.seed, keys, at)
        # The FP32 bits travel beside the ids in one int32 buffer, so that the host fetches all in one copy.
        result = torch.stack([torch.where(running, token, -1).int(), logprob.view(torch.int32)])
        self.out[:, :, :B].index_copy_(0, count, result[None])
        current.copy_(torch.where(running, token, current))
        position += running
        end.mul_(~(running & self.is_stop[token]))                     # 0 <= position: the row has stopped
        count += 1

    def _launch(self, steps):
        """Uploads the rows and starts so many decode steps, without waiting for them."""
        n = len(self.active)
        B = next(b for b in BUCKETS + (self.slots,) if n <= b <= self.slots)
        graph = self._graph(B) if self.device.type == "cuda" else None
        self.host_ids[:, :n] = ([s.current for s in self.active], [s.key for s in self.active], [0] * n)
        self.host_spans[:, :n] = ([s.position for s in self.active], [s.end for s in self.active])
        self.host_spans[:, n:] = 0
        for device, host in zip((self.ids, self.spans, self.table), self.uploads):
            device.copy_(host, non_blocking=True)    # pinned; the host writes there again after the next wait only
        for _ in range(steps):
            graph.replay() if graph else self._step(B)

    def _graph(self, B):
        """The captured step of B rows. It reads weights, pages and rows by address, so all may change in place."""
        if B not in self.graphs:
            self.spans.zero_()
            self.ids.zero_()
            self._step(B)                            # no row runs: compiles the kernels and changes nothing
            self.ids.zero_()
            torch.cuda.synchronize(self.device)
            self.graphs[B] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[B], pool=self.graph_memory):
                self._step(B)
        return self.graphs[B]

    # ---- one look: everything the host decides -------------------------------------------------------------

    def _harvest(self, steps):
        """Waits for the steps, appends their tokens to the sequences and takes finished ones out of their rows."""
        n = len(self.active)
        self.host_out.copy_(self.out, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()       # the one wait of a look
        out = self.host_out.numpy()[:steps, :, :n]
        tokens, logprobs = out[:, 0], out[:, 1].view(np.float32)       # (steps, n)
        counts = (tokens >= 0).sum(0).tolist()
        for step, row in np.argwhere((tokens >= 0) & ~np.isfinite(logprobs)):
            seq = self.active[row]
            raise FloatingPointError(f"completion {seq.index}: log-prob of generated token {seq.count + step} is "
                                     f"{logprobs[step, row]}: the logits are not finite, check the weights")
        for row in reversed(range(n)):               # from the end: the row that fills a gap has been seen already
            seq, new = self.active[row], counts[row]
            seq.tokens[seq.count:seq.count + new] = tokens[:new, row]
            seq.logprobs[seq.count:seq.count + new] = logprobs[:new, row]
            seq.count += new
            if seq.current in self.stop or seq.count == seq.limit:
                self._vacate(seq)
        self.stats.n_tokens += sum(counts)
        self.stats.steps += steps

    def _vacate(self, seq):
        """Takes a sequence out of its row and returns its pages. The last row moves into the gap."""
        self.pool.release(seq.pages)
        seq.pages = None
        last = self.active.pop()
        if last is not seq:
            self.active[seq.row], last.row = last, seq.row
            self.host_table[seq.row] = self.host_table[len(self.active)]

    def _reserve(self):
        """Gives every row the pages of its next steps; if none is left, the youngest sequence returns to the queue.

        It resumes from a prefill of all that it had, to the same page bits by the contract: only time is lost. The
        oldest one never goes, so there is always progress.
        """
        for seq in list(self.active):
            while seq.pages and (short := self._span(seq) - len(seq.pages)) > 0:
                if self.pool.free >= short:
                    seq.pages += self.pool.take(short)
                    self.host_table[seq.row, :len(seq.pages)] = seq.pages
                elif self.shared:
                    self._drop_shared()
                else:
                    self._preempt(max(self.active, key=lambda s: s.age))

    def _span(self, seq):
        """Pages of a sequence up to the last position that the next steps can write."""
        return pages_for(min(seq.position + STEPS_PER_LOOK, seq.end))

    def _growth(self, seq):
        """Free pages left to a running sequence before another one may start, against preempting all the time."""
        return min(pages_for(seq.end) - len(seq.pages), GROWTH_PAGES)

    def _preempt(self, seq):
        self._vacate(seq)
        seq.prefix = _Prefix((seq.prompt + seq.tokens[:seq.count].tolist())[:-1], waiting=1)
        self.queue.appendleft(seq)
        self.stats.preemptions += 1

    def _drop_shared(self):
        """Returns the pages kept for samples that still wait; the next of them prefills the prompt again."""
        self.pool.release(self.shared.pages)
        self.shared.pages = self.shared = None

    def _admit(self):
        """Moves sequences from the queue into free rows while pages last, then prefills what is new in few calls.

        The samples of a prompt share its full pages. The last, partly filled page is copied for each, as each goes on
        writing there; the last sample takes it over instead. The queue is in order and a preempted sequence shares
        nothing, so at most one prompt (`self.shared`) has samples admitted and samples waiting.
        """
        prefills, copies = [], []
        growth = sum(self._growth(seq) for seq in self.active)
        while self.queue and len(self.active) < self.slots:
            seq = self.queue[0]
            prefix, filled = seq.prefix, len(seq.prefix.tokens)
            others = prefix.waiting > 1
            partial = int(others and filled % PAGE > 0)
            need = self._span(seq) + partial - (pages_for(filled) if prefix.pages is not None else 0)
            if need + growth > self.pool.free:
                if self.active or self.shared in (None, prefix):
                    break
                self._drop_shared()
                continue
            self.queue.popleft()
            if prefix.pages is None:
                prefix.pages = self.pool.take(pages_for(filled))
                prefills.append((prefix.tokens, list(prefix.pages)))
            if others:
                seq.pages = self.pool.share(prefix.pages[:filled // PAGE]) + self.pool.take(partial)
                if partial:
                    copies.append((prefix.pages[-1], seq.pages[-1]))
                self.shared = prefix
            else:
                seq.pages, prefix.pages = prefix.pages, None
                self.shared = None if self.shared is prefix else self.shared
            prefix.waiting -= 1
            seq.pages += self.pool.take(self._span(seq) - len(seq.pages))
            seq.row, seq.age, self.admissions = len(self.active), self.admissions, self.admissions + 1
            self.active.append(seq)
            self.host_table[seq.row, :len(seq.pages)] = seq.pages
            growth += self._growth(seq)
        self._prefill(prefills)
        if copies:
            self.pool.copy(copies)

    def _prefill(self, prefills):
        """Runs the trainer's pass over (tokens, pages) pairs, about PREFILL_TOKENS packed tokens at a time."""
        batches, room = [], 0
        for tokens, pages in prefills:
            if tokens:                               # a prompt of one token has nothing to prefill
                if len(tokens) > room:
                    batches.append([])
                    room = PREFILL_TOKENS
                slots = np.array(pages)[:, None] * PAGE + np.arange(PAGE)               # (pages, PAGE)
                batches[-1].append((tokens, slots.flat[:len(tokens)]))
                room -= len(tokens)
        for batch in batches:
            tokens = torch.tensor(np.concatenate([t for t, _ in batch]), device=self.device)        # (T,) int64
            slots = torch.tensor(np.concatenate([s for _, s in batch]), device=self.device)         # (T,) int64
            self.model.prefill(tokens, [len(t) for t, _ in batch], self.pool.k_pages, self.pool.v_pages, slots)
            self.stats.prefill_tokens += len(tokens)

    # ---- memory --------------------------------------------------------------------------------------------

    def _plan(self, sequences):
        """Chooses slots, pages and the width of the page table for a request, before any device work.

        A pool that is large enough stays, graphs included. Otherwise all is built anew, never smaller than it was.
        """
        needs = sorted((pages_for(s.end) for s in sequences), reverse=True)
        width = max(-(-needs[0] // 16) * 16, self.width)          # some room: prompts differ from step to step
        slots = max(min(len(sequences), self.max_slots or MAX_SLOTS[self.device.type]), self.slots)
        # At most what the largest `slots` sequences need; an eighth more as room; page 0 and a shared last page.
        pages = self.max_pages or sum(needs[:slots]) * 9 // 8 + 2
        if self.pool is not None:
            have = self.pool.capacity + 1
            if (slots, width) == (self.slots, self.width) and have >= min(pages, self.memory_pages):
                slots = 0                                         # nothing to build
            pages = max(pages, have)
        if slots:
            self.release()
            self.memory_pages = self._pages_in_memory(width)
            pages = min(pages, self.memory_pages)
        else:
            pages = have
        if pages < needs[0] + 2:
            raise ValueError(f"the longest sequence (prompt + max_new_tokens) needs {needs[0] + 2} pages of {PAGE} "
                             f"tokens, there are {pages}: lower max_new_tokens, or give the sampler more memory")
        if slots:
            self._build(slots, width, pages)

    def _pages_in_memory(self, width):
        """Pages that fit beside everything else on the GPU, the activations of the largest prefill left aside."""
        if self.device.type != "cuda":
            return sys.maxsize
        c = self.model.config
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] * self.memory_fraction
        # Per token: residual, norm output and delta, q k v and the attention output, gate, up and their product.
        heads = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        activations = 2 * (4 * c.hidden_size + 2 * heads + 4 * c.intermediate_size)
        return int((free - max(PREFILL_TOKENS, width * PAGE) * activations) // self._page_bytes())

    def _page_bytes(self):
        c = self.model.config
        item = self.model.head.data.element_size()
        return 2 * c.num_hidden_layers * c.num_key_value_heads * PAGE * c.head_dim * item

    def _build(self, slots, width, pages):
        device, pin = self.device, self.device.type == "cuda"
        self.slots, self.width = slots, width
        self.pool = PagePool(self.model.config, pages, self.model.head.data.dtype, device)
        self.ids = torch.zeros(3, slots, dtype=torch.int64, device=device)      # current token | key | step count, at [2, 0]
        self.spans = torch.zeros(2, slots, dtype=torch.int32, device=device)    # position | end
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.out = torch.zeros(STEPS_PER_LOOK, 2, slots, dtype=torch.int32, device=device)     # token | bits of log-prob
        self.is_stop = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.inv_temp, self.noise = torch.ones(2, 1, device=device).unbind(0)   # FP32: 1/temperature; 0 for greedy
        # The host's copies: pinned, so that a copy neither waits nor is staged; written through numpy.
        self.uploads = [torch.zeros_like(t, device="cpu", pin_memory=pin) for t in (self.ids, self.spans, self.table)]
        self.host_ids, self.host_spans, self.host_table = (t.numpy() for t in self.uploads)
        self.host_out = torch.zeros_like(self.out, device="cpu", pin_memory=pin)
        if pin:
            self.graph_memory = torch.cuda.graph_pool_handle()       # one for all: only one graph runs at a time
            print(f"sampler: {slots} slots, {pages:,} pages of {PAGE} tokens ({pages * PAGE:,} tokens, "
                  f"{pages * self._page_bytes() / 2**30:.1f} GiB), sequences up to {width * PAGE:,} tokens", flush=True)

    def release(self):
        """Frees pages and graphs; the next `generate` builds them again.

        The trainer may want this memory between two rollouts. It costs a capture per batch size (a fraction of a second
        each), so a model that fits beside its pages should never call it.
        """
        self.pool, self.graphs = None, {}
        self.ids = self.spans = self.table = self.out = self.is_stop = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the loop -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts, n=1, max_new_tokens=256, temperature=1.0, seed=0, stop=None, keys=None):
        """Samples n completions of every prompt. -> Rollout

        prompts          lists of token ids
        max_new_tokens   an int, or one per completion (len(prompts) * n of them)
        temperature      logits are divided by it, in the log-probs too; 0 is greedy (ties to the lowest id), with
                         log-probs at temperature 1
        seed             with `keys`, which name the completions (default 0, 1, 2, ...), and the position in the sequence
                         it is all the noise depends on
        stop             ids that end a completion; default config.eos_token_id; [] always runs to the limit

        ValueError for a request that cannot be served, before any work; FloatingPointError for log-probs that are not
        finite.
        """
        start = time.perf_counter()
        config = self.model.config
        limits, stop, keys = check_request(config, prompts, n, max_new_tokens, temperature, seed, stop, keys)
        prompts = [[int(t) for t in prompt] for prompt in prompts]
        prefixes = [_Prefix(prompt[:-1], waiting=n) for prompt in prompts]
        sequences = [_Sequence(i, prompts[i // n], prefixes[i // n], key, limit, np.empty(limit, np.int32),
                               np.empty(limit, np.float32)) for i, (key, limit) in enumerate(zip(keys, limits))]
        self._plan(sequences)
        self.pool.reset()
        self.queue, self.active, self.shared, self.admissions = deque(sequences), [], None, 0
        self.stop, self.stats, self.shown = stop, Rollout(), start
        self.is_stop.zero_()[stop] = True
        self.seed.fill_(seed)
        self.inv_temp.fill_(1 / temperature if temperature else 1.0)
        self.noise.fill_(1.0 if temperature else 0.0)

        while self.queue or self.active:
            self._reserve()
            self._admit()
            steps = min(STEPS_PER_LOOK, max(s.limit - s.count for s in self.active))
            self._launch(steps)
            self._harvest(steps)
            if self.verbose:
                self._progress(len(sequences), start)

        assert self.pool.free == self.pool.capacity, \
            f"{self.pool.capacity - self.pool.free} of {self.pool.capacity} pages were not returned: a bug of the sampler"
        result = self.stats
        result.tokens = [s.tokens[:s.count].tolist() for s in sequences]
        result.logprobs = [torch.from_numpy(s.logprobs[:s.count].copy()) for s in sequences]
        result.finish = ["stop" if s.current in stop else "length" for s in sequences]
        result.occupancy = result.n_tokens / (result.steps * self.slots)
        result.seconds = time.perf_counter() - start
        return result

    def _progress(self, total, start):
        """One line that rewrites itself on a terminal; a plain line every 10 s where the output is a file."""
        now, terminal, last = time.perf_counter(), sys.stdout.isatty(), not (self.queue or self.active)
        if now - self.shown > (0.2 if terminal else 10.0) or (last and terminal):
            self.shown = now
            done = total - len(self.queue) - len(self.active)
            print(f"{chr(13) if terminal else ''}rollout: {done:,} of {total:,} sequences, {self.stats.n_tokens:,} tokens, "
                  f"{self.stats.n_tokens / (now - start):,.0f} tok/s, {self.pool.capacity - self.pool.free:,} of "
                  f"{self.pool.capacity:,} pages  ", end="" if terminal and not last else chr(10), flush=True)


def check_request(config, prompts, n, max_new_tokens, temperature, seed, stop, keys):
    """Refuses what cannot be served, with the numbers. -> limits, stop, keys as lists, one limit and key a completion."""
    def refuse(wrong, message):
        if wrong:
            raise ValueError(message)

    V, most = config.vocab_size, config.max_position_embeddings
    refuse(not isinstance(n, int) or n < 1, f"n is {n}: the number of completions of a prompt must be at least 1")
    refuse(len(prompts) == 0, "there are no prompts")
    total = len(prompts) * n
    limits = [max_new_tokens] * total if isinstance(max_new_tokens, int) else list(max_new_tokens)
    refuse(len(limits) != total, f"max_new_tokens has {len(limits)} entries for {total} completions "
                                 f"({len(prompts)} prompts, n={n}): give one number, or one each")
    for i, limit in enumerate(limits):
        refuse(limit < 1, f"max_new_tokens of completion {i} is {limit}: it must be at least 1")
    for i, prompt in enumerate(prompts):
        refuse(len(prompt) == 0, f"prompt {i} is empty: there is no token to continue from")
        low, high = min(prompt), max(prompt)
        refuse(low < 0 or high >= V, f"prompt {i} holds the id {low if low < 0 else high}, but the vocabulary of the model "
                                     f"has {V} ids: was it encoded by another tokenizer?")
        longest = len(prompt) + max(limits[i * n:(i + 1) * n])
        refuse(longest > most, f"prompt {i} has {len(prompt)} tokens, with max_new_tokens {longest}, but the model takes "
                               f"{most} (max_position_embeddings): shorten the prompt or lower max_new_tokens")
    refuse(not (math.isfinite(temperature) and temperature >= 0), f"temperature is {temperature}: it must be 0 (greedy) or "
                                                                  "a positive number")
    refuse(0 < temperature < 1e-6, f"temperature is {temperature}: below 1e-6 the logits overflow; 0 is greedy")
    stop = [int(s) for s in (config.eos_token_id if stop is None else stop)]
    refuse(any(not 0 <= s < V for s in stop), f"stop holds an id outside 0..{V - 1}: {stop}")
    keys = list(range(total)) if keys is None else [int(k) for k in keys]
    refuse(len(keys) != total, f"keys has {len(keys)} entries for {total} completions ({len(prompts)} prompts, n={n})")
    refuse(any(not -2**63 <= k < 2**63 for k in keys + [seed]), "seed and keys must fit 64 bits")
    return limits, stop, keys


# ---- the command line: talk to a checkpoint -----------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description="Sample from a checkpoint folder.")
    parser.add_argument("--model", required=True, help="Hugging Face folder, or a saved run of train.py")
    parser.add_argument("--prompt", required=True, help="put into the checkpoint's chat template, if it has one")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--n", type=int, default=1, help="completions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="fp8", help="fp8, fp8-rollout or bf16")
    parser.add_argument("--device", default=None, help="cuda or cpu; default: cuda where there is one")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=None,
                        help="for chat templates that have this switch")
    parser.add_argument("--debug", action="store_true", help="full traceback of an error")
    args = parser.parse_args()
    try:
        talk(args)
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        if args.debug:
            raise
        sys.exit(f"error: {error}")


def talk(args):
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        print("on the CPU: the plain torch reference, slow and exact (no CUDA device, or --device=cpu)", file=sys.stderr)
    tokenizer = Tokenizer.from_pretrained(args.model)      # first: it is quick, and what it refuses is refused early
    if tokenizer.template:
        messages = [{"role": "user", "content": args.prompt}]
        ids = tokenizer.chat(messages) if args.thinking is None else tokenizer.chat(messages, thinking=args.thinking)
    else:
        ids = tokenizer.encode(args.prompt)
    model = Transformer.from_pretrained(args.model, precision=args.precision, device=device)
    rollout = Sampler(model, verbose=sys.stdout.isatty()).generate(
        [ids], args.n, args.max_new_tokens, args.temperature, args.seed, stop=tokenizer.eos_ids)
    for i, (tokens, finish) in enumerate(zip(rollout.tokens, rollout.finish)):
        if args.n > 1:
            print(f"---- {i + 1} of {args.n}")
        text = tokens[:-1] if finish == "stop" else tokens
        print(tokenizer.decode(text) + ("" if finish == "stop" else " [...]"))
    print(f"{len(ids)} prompt tokens, {rollout.n_tokens} sampled in {rollout.seconds:.1f} s "
          f"({rollout.tok_per_s:,.0f} tok/s, compilation included)", file=sys.stderr)


if __name__ == "__main__":
    main()
