"""
Train a language model by GRPO, with the sampler and the trainer in one process on one GPU, or one a GPU.

    python train.py                            # a small model from nothing: supervised phase, then GRPO
    python train.py --model=Qwen/Qwen3-0.6B --task=jsonl --data=train.jsonl,test.jsonl
    python train.py --out=runs/mine ... --resume   # the flags of a run that was stopped, and --resume
    torchrun --standalone --nproc-per-node=8 train.py ...    # the same on the 8 GPUs of a host

This file holds the run: flags, loop, log, checkpoints. A step is five phases, and `grpo_step` reads as such:
rollout (rollout.py), reward and advantage (grpo.py), update (model.py and fp8.py), log. `--precision` chooses
what multiplies in FP8; in `fp8`, the default, the log-probs of sampler and trainer are compared bit by bit on
every token of each step's first update, and a difference stops the run.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

# Micro-batches differ in size: blocks of fixed size would leave a quarter of the memory in unusable pieces.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import fp8
import grpo
import model as model_file
from model import KV_TYPES, PRECISIONS, Tokenizer, Transformer, to_device, token_logprobs
from rollout import (MAX_SAMPLES, MAX_SLOTS, Parser, Rollout, Sampler, check_request, explain, in_batches,
                     refuse)

# Read it top down: the flags, the loop, what a run holds and does; then what serves them: printed lines,
# estimates of memory, several GPUs, files.

# ---- configuration -------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def opt(default, help, least=0, choices=None):
    """A field with the help text of its flag, and the least number or the words that make sense."""
    return dataclasses.field(default=default, metadata=dict(help=help, least=least, choices=choices))


def flag(name):
    return "--" + name.replace("_", "-")


@dataclasses.dataclass
class Config:
    """Every flag of the command line. Of three defaults the first two are those of the small model, on a GPU
    and on a CPU; the third is that of a checkpoint (--model)."""

    # what is trained, on what
    model: str = opt("", "checkpoint folder or Hugging Face name; empty: a small model from random weights")
    task: str = opt("sum", "what is learned", choices=grpo.TASKS)
    data: str = opt("", "for --task=jsonl: TRAIN.jsonl,HELDOUT.jsonl with fields question and answer")
    difficulty: int = opt((4, 3, 4), "for generated tasks: number of terms, so length of a solution", least=1)
    digits: int = opt((2, 1, 2), "for --task=sum: digits of a term", least=1)
    precision: str = opt("fp8", "fp8-rollout: FP8 in the sampler alone; fp8: in both", choices=PRECISIONS)
    kv: str = opt("bf16", "keys and values, on both sides; fp8 is half the cache", choices=KV_TYPES)
    device: str = opt("", "cuda or cpu; empty: cuda if there is one")
    seed: int = opt(0, "seed of weights, problems and samples")
    layers: int = opt((6, 2, None), "layers of the small model", least=1)
    width: int = opt((512, 128, None), "hidden size of the small model", least=1)
    # supervised phase
    sft_steps: int = opt((800, 400, 0), "supervised steps on worked solutions before GRPO (0: none)")
    sft_batch: int = opt((256, 32, 64), "solutions a supervised step", least=1)
    sft_lr: float = opt((1e-3, 3e-3, 1e-5), "peak learning rate of the supervised phase")
    # GRPO
    steps: int = opt((60, 30, 100), "GRPO steps")
    prompts: int = opt((64, 16, 32), "problems a step", least=1)
    samples: int = opt((16, 8, 8), "completions a problem: one group, whose mean is the baseline", least=2)
    updates: int = opt(1, "optimizer updates a step, each on its share of the problems", least=1)
    max_new_tokens: int = opt((128, 32, 512), "longest completion, in tokens", least=1)
    temperature: float = opt(1.0, "of the training samples, in sampler and trainer alike", least=1e-6)
    lr: float = opt((1e-4, 1e-4, 1e-6), "peak learning rate of GRPO")
    warmup: int = opt(5, "steps over which the learning rate rises linearly")
    lr_decay: float = opt(0.0, "share of the learning rate that is lost, linearly, over the run")
    weight_decay: float = opt(0.0, "AdamW's, on matrices")
    grad_clip: float = opt(1.0, "largest norm of the whole gradient", least=1e-6)
    clip_low: float = opt(0.2, "the ratio is clipped below 1 - clip_low")
    clip_high: float = opt(0.28, "the ratio is clipped above 1 + clip_high")
    loss_mean: str = opt("token", "mean over tokens, or completions' means", choices=("token", "completion"))
    normalize_std: bool = opt(False, "divide advantages by the group's standard deviation")
    drop_truncated: bool = opt(False, "leave completions that reached max_new_tokens out of the loss")
    drop_equal: bool = opt(False, "leave groups of equal rewards, which have no gradient, out of the loss")
    kl: float = opt(0.0, "weight of the KL divergence to the policy GRPO starts from (0: no second model)")
    tis: float = opt(0.0, "with fp8-rollout: weigh tokens by min(TIS, old / sampler probability) (0: off)")
    # engine
    micro_tokens: int = opt((32768, 4096, 16384), "tokens in one packed forward and backward pass", least=1)
    recompute: bool = opt(False, "run each layer again in the backward pass, instead of keeping activations")
    states: str = opt("fp32", "AdamW's masters, moments; bf16 (stochastic rounding) is half", choices=STATES)
    exact: str = opt("", "when a log-prob differs; empty: stop in fp8 on Hopper or a CPU, else warn",
                     choices=("stop", "warn", "off"))
    # evaluation, logging, saving
    eval_every: int = opt((20, 10, 0), "steps between evaluations (0: only before and after)")
    eval_problems: int = opt(256, "held-out problems of an evaluation", least=1)
    eval_samples: int = opt(1, "answers to each: 1 is greedy, more are drawn for pass@1 and pass@k", least=1)
    sample_every: int = opt(20, "steps between printed completions (0: none)")
    save_every: int = opt(50, "steps between checkpoints (0: only at the end)")
    keep: int = opt(2, "checkpoints that are kept", least=1)
    out: str = opt("", "run folder; empty: runs/TASK-PRECISION-TIME")
    resume: bool = opt(False, "continue from the newest checkpoint in --out, if there is one")
    wandb: str = opt("", "Weights & Biases project to log to as well (needs the package wandb)")
    debug: bool = opt(False, "show the whole traceback of an error")


def parse(argv):
    """Command line -> Config."""
    parser = Parser(description=__doc__.split("\n\nThis file")[0], allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Config):
        takes = (dict(action=argparse.BooleanOptionalAction) if f.type is bool else
                 dict(type=f.type, choices=f.metadata["choices"]))
        shown = f.default
        if type(shown) is tuple:
            words = "{}", "on a CPU {}", "with --model {}"
            shown = "; ".join(word.format(value) for word, value in zip(words, shown) if value is not None)
        parser.add_argument(flag(f.name), default=f.default, help=f"{f.metadata['help']} [{shown}]", **takes)
    cfg = Config(**vars(parser.parse_args(argv)))
    cfg.device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    which = 2 if cfg.model else 1 if cfg.device == "cpu" else 0
    for name, value in vars(cfg).items():
        if type(value) is tuple:
            setattr(cfg, name, value[which])
    check(cfg)
    cfg.out = cfg.out or f"runs/{cfg.task}-{cfg.precision}-{time.strftime('%Y%m%d-%H%M%S')}"
    return cfg


def check(cfg):
    """Refuse, in seconds and before anything is loaded, what cannot work."""
    for f in dataclasses.fields(cfg):
        value, least = getattr(cfg, f.name), f.metadata["least"]
        refuse(f.type in (int, float) and value is not None and not least <= value < math.inf,   # NaN as well
               f"{flag(f.name)}={value}: must be a number of at least {least}")
    refuse(not re.fullmatch(r"cpu|cuda(:\d+)?", cfg.device),
           f"--device={cfg.device}: it must be cuda, cuda:N or cpu")
    refuse(cfg.device != "cpu" and not torch.cuda.is_available(),
           "--device=cuda, but torch sees no CUDA device: check the driver, or use the CPU")
    refuse(cfg.resume and not cfg.out, "--resume needs --out=FOLDER, the folder of the run to go on with")
    refuse(cfg.seed >= 2**63, f"--seed={cfg.seed}: it must be below 2^63")
    refuse(cfg.lr_decay > 1, f"--lr-decay={cfg.lr_decay}: a share is 1 at most")
    refuse(cfg.updates > cfg.prompts,
           f"--updates={cfg.updates}: each needs a problem of --prompts={cfg.prompts}")
    refuse(max(cfg.samples, cfg.eval_samples) > MAX_SAMPLES,
           f"--samples={cfg.samples}, --eval-samples={cfg.eval_samples}: at most {MAX_SAMPLES} each")
    refuse(cfg.drop_equal and cfg.kl, f"--drop-equal leaves out what --kl={cfg.kl} learns from: drop one")
    refuse(cfg.tis and cfg.precision != "fp8-rollout",
           f"--tis={cfg.tis} is for --precision=fp8-rollout, not {cfg.precision}")
    files = cfg.data.split(",")
    refuse(cfg.task == "jsonl" and not (len(files) <= 2 and all(files)),
           f"--task=jsonl needs --data=TRAIN.jsonl,HELDOUT.jsonl, not '{cfg.data}'\n(GSM8K: {grpo.GSM8K})")
    refuse(cfg.task != "jsonl" and cfg.data, f"--data={cfg.data} is read by --task=jsonl, not by {cfg.task}")
    refuse(cfg.wandb and importlib.util.find_spec("wandb") is None,
           "--wandb needs the package wandb: pip install wandb (log.jsonl has it all too)")
    if (count := world_size()) > 1:
        refuse(os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"],
               "the ranks are spread over several hosts, and only one is supported: --standalone")
        refuse(cfg.device not in ("cuda", "cpu"),
               f"--device={cfg.device}: under torchrun every rank takes the GPU of its own number")
        refuse(cfg.device == "cuda" and torch.cuda.device_count() < count,
               f"--nproc-per-node={count}, but torch sees {torch.cuda.device_count()} GPUs")
        refuse(cfg.prompts < count, f"--prompts={cfg.prompts}: each of the {count} ranks samples for one or "
                                    "more: raise it, or lower --nproc-per-node")


# ---- the loop ------------------------------------------------------------------------------------

def train(run):
    """The run: evaluation, supervised phase, GRPO steps, checkpoints."""
    cfg, resumed = run.cfg, run.restore()
    header(run, resumed)
    if run.ranks.rank == 0:
        run.keep_flags()
    if not resumed:
        start_policy(run)
    pressed, first = on_interrupt(), run.step
    print(COLUMNS)
    while run.step < cfg.steps and not any(run.ranks.gather(bool(pressed))):    # all stop after the same step
        r = grpo_step(run)
        run.log(r)
        print(step_line(r), flush=True)
        watch(run, r)
        run.step += 1
        last = run.step == cfg.steps
        if run.step == first + 2 and not last:      # the first step compiles
            seconds, rest = r["t_rollout_s"] + r["t_train_s"], cfg.steps - run.step
            print(f"note: this step took {seconds:.1f} s; the other {rest} may take "
                  f"{datetime.timedelta(seconds=round(rest * seconds))}")
        if last or cfg.eval_every and run.step % cfg.eval_every == 0:
            run.evaluate("at the end" if last else f"after {run.step} steps")
        if cfg.save_every and run.step % cfg.save_every == 0:
            run.save()
    folder = run.save()
    if run.step < cfg.steps:
        print(f"interrupted after {run.step} steps, saved {folder}: the same flags with --resume go on")
        return
    summary(run)
    print(f"saved {folder} | {time.time() - run.start_clock:.0f} s in all")


def start_policy(run):
    """What precedes GRPO: from random weights, or a base model, to a policy that sometimes earns a reward."""
    cfg, skipped = run.cfg, 0           # skipped: on the device, so that the host need not wait
    run.evaluate("at the start")
    hand_over(run.sampler, run.update_needs)
    t0 = time.time()
    for step in range(cfg.sft_steps):
        loss, finite = run.supervised_step(step)
        skipped = skipped + (~finite).int()
        if step % max(1, cfg.sft_steps // 10) == 0 or step == cfg.sft_steps - 1:
            print(f"supervised {step:5d} | loss {loss.item():.4f} | {time.time() - t0:.1f} s")
            run.log({"kind": "supervised", "step": 0, "sft_step": step, "loss": loss.item()})
            if skipped:
                print(f"warning: {int(skipped)} supervised steps had a non-finite gradient and were skipped")
            if skipped > 4:
                raise RuntimeError("the supervised phase does not get on: lower --sft-lr, check the weights")
    for moment in (*run.optimizer.m.values(), *run.optimizer.v.values(), run.optimizer.steps):
        moment.zero_()                    # GRPO is a new objective, whose gradients have another size
    # The KL term's reference. Kept even without --kl, which a resumed run may ask for.
    if run.ranks.rank == 0 and (cfg.sft_steps or not cfg.model):
        run.model.save_pretrained(run.out / "start", run.optimizer.master.items())
        sync(run.out / "start")
    if cfg.sft_steps:
        run.evaluate("after the supervised phase")
        if cfg.save_every:
            run.save()


def grpo_step(run):
    """One step in five phases; returns the record of the log."""
    cfg = run.cfg
    synchronize = torch.cuda.synchronize if run.device.type == "cuda" else lambda: None
    t0 = time.time()

    # ---- rollout
    examples = run.problems(cfg.sft_steps * cfg.sft_batch + run.step * cfg.prompts, cfg.prompts)
    prompts = [run.encode_prompt(e) for e in examples]
    rollout = run.rollout(prompts)
    synchronize()
    t1 = time.time()

    # ---- reward
    texts = [run.text(tokens) for tokens in rollout.tokens]
    rewards = torch.tensor([examples[i // cfg.samples].reward(text) for i, text in enumerate(texts)])

    # ---- advantage
    advantages = grpo.advantages(rewards, cfg.samples, cfg.normalize_std)
    batches = run.update_batches(prompts, rollout, advantages)

    # ---- update
    names = ["clipped_low", "clipped_high", "ratio", "entropy", "loss"] + ["kl"] * (cfg.kl > 0)
    metrics, finites = grpo.Metrics(names), []
    for u, batch in enumerate(batches):
        trainer, norm, finite = run.update(batch, metrics)
        finites.append(finite)
        if u == 0:      # later updates score with moved weights: only the first can be compared
            run.check_exact(batch, trainer)
            gap = grpo.mismatch(batch["sampler"], trainer)
            sums = {name: gap[name].double() * len(trainer) for name in ("mean_dlogp", "k3", "differing")}
            metrics.add(len(trainer), sums)
    synchronize()
    t2 = time.time()

    # ---- log
    skipped = sum(not finite.item() for finite in finites)
    run.skipped, run.bad = run.skipped + skipped, run.bad + 1 if skipped else 0
    if cfg.sample_every and run.step % cfg.sample_every == 0:
        print(f"--- a completion of reward {rewards[0].item():g}: {examples[0].prompt!r} -> {texts[0]!r}")
    return record(run, rollout, rewards, batches, metrics, gap, norm, (t0, t1, t2))


def record(run, rollout, rewards, batches, metrics, gap, norm, clock):
    """A step for the log: means over the tokens of all updates and ranks, what rollout and clock say."""
    sums, gap = ({name: float(x) for name, x in values.items()} for values in (metrics.sums, gap))
    parts = run.ranks.gather((sums, metrics.counts, gap))
    total = lambda i, name: sum(part[i][name] for part in parts)
    means = {name: total(0, name) / max(total(1, name), 1) for name in sums}
    worst_gap = torch.tensor([part[2]["max_dlogp"] for part in parts]).max().item()    # NaN stays NaN
    (t0, t1, t2), lengths = clock, [len(tokens) for tokens in rollout.tokens]
    groups = rewards.view(-1, run.cfg.samples)
    best, worst = groups.max(1).values, groups.min(1).values
    trained = sum(batch["fed"] for batch in batches)
    mem = torch.cuda.max_memory_allocated(run.device) / 2**30 if run.device.type == "cuda" else 0.0
    return {"kind": "step", "step": run.step, "reward": rewards.mean().item(),
            "solved": (best > 0).float().mean().item(),
            "equal_groups": (best == worst).float().mean().item(), "length": sum(lengths) / len(lengths),
            "length_max": max(lengths), "truncated": rollout.finish.count("length") / len(lengths),
            **means, "max_dlogp": worst_gap, "differing_tokens": total(2, "differing_tokens"),
            "grad_norm": norm.item(), "skipped": run.skipped, "tokens": sum(lengths),
            "lr": run.learning_rate(run.step),
            "t_rollout_s": t1 - t0, "rollout_tok_per_s": sum(lengths) / (t1 - t0),
            "t_train_s": t2 - t1, "train_tok_per_s": trained / (t2 - t1), "mem_gib": mem}


def watch(run, r):
    """Warn of steps without a gradient and of skipped ones. Five skipped in a row end the run."""
    silent = run.cfg.drop_truncated and r["truncated"] == 1 or not run.cfg.kl and r["equal_groups"] == 1
    run.silent = run.silent + 1 if silent else 0
    if run.silent in (3, 30, 300):
        print(f"warning: for {run.silent} steps every group had equal rewards or was left out: no gradient "
              f"(truncated {r['truncated']:.0%}: try --max-new-tokens, an easier task, more --sft-steps)")
    if run.bad:
        print(f"warning: an update of step {r['step']} had a non-finite gradient and was skipped "
              f"({r['skipped']} so far)")
    if run.bad == 5:
        raise RuntimeError("5 steps in a row had a non-finite gradient: lower --lr, or go on from an older "
                           "checkpoint; --debug or --precision=bf16 help to find out why")


def on_interrupt():
    """-> a list that the first Ctrl-C fills: the step is finished and saved. The second one stops at once.

    torchrun passes Ctrl-C on to all ranks, but kills them after 30 s (more: TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    pressed = []

    def handler(signum, frame):
        pressed.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("interrupted: this step is finished first, then saved (Ctrl-C again: stop at once)", flush=True)
    signal.signal(signal.SIGINT, handler)
    return pressed


# ---- packing -------------------------------------------------------------------------------------

def fed(sequence):
    """Tokens of a (prompt, completion) pair that a pass is fed: the last one has nothing to predict."""
    return len(sequence[0]) + len(sequence[1]) - 1


def micro_batches(sequences, budget):
    """Pairs, in order, in lists of up to `budget` fed tokens (or of one pair)."""
    return in_batches(sequences, fed, budget)


def score(model, sequences, inv_temp):
    """Log-probs of all completion tokens, one after the other: FP32 (N,). One packed pass, differentiable."""
    tokens, rows, targets, start = [], [], [], 0
    for prompt, completion in sequences:
        tokens += prompt + completion[:-1]
        targets += completion
        rows += range(start + len(prompt) - 1, len(tokens))
        start = len(tokens)
    # numpy reads long lists many times faster than torch does.
    tokens, rows, targets = (to_device(torch.from_numpy(np.array(ids, np.int64)), inv_temp.device)
                             for ids in (tokens, rows, targets))
    # By indexing, whose backward pass adds in a fixed order; that of index_select would use atomics.
    hidden = model(tokens, [fed(sequence) for sequence in sequences])[rows]           # (N, C)
    return token_logprobs(hidden, model.head, targets, inv_temp)


# ---- the run -------------------------------------------------------------------------------------

class Run:
    """Everything a run holds; its methods are what `grpo_step` and `train` are made of."""

    def __init__(self, cfg):
        self.cfg, self.start_clock = cfg, time.time()
        self.step = self.logged = self.skipped = 0       # steps done, lines of the log, updates skipped
        self.bad = self.silent = 0                       # steps in a row that were skipped, had no gradient
        self.ranks, self.reference = Ranks(cfg.device), None
        self.device = self.ranks.device
        args = {"sum": [cfg.difficulty, cfg.digits], "countdown": [cfg.difficulty],
                "jsonl": cfg.data.split(",")}.get(cfg.task, [])
        self.task = grpo.TASKS[cfg.task](*args, seed=cfg.seed, heldout=cfg.eval_problems)
        if cfg.model:
            folder = model_file.folder_from_name(cfg.model)
            config = model_file.Config.from_folder(folder)
            self.tokenizer = Tokenizer.from_pretrained(folder)
        else:
            self.tokenizer = Tokenizer.bytes()
            config = small_config(cfg, self.tokenizer)
        # What depends on the clock is rank 0's: the default name of the folder, the date in chat templates.
        cfg.out, now = self.ranks.gather([cfg.out, self.tokenizer.now.isoformat()])[0]
        self.out, self.tokenizer.now = Path(cfg.out), datetime.datetime.fromisoformat(now)
        self.longest = self.leave_out_long_problems(config)
        self.estimate_memory(config)
        if cfg.model:
            model_file.read_tensors(folder, config)    # checks the files: before memory is taken
        if self.ranks.rank == 0:
            self.prepare_folder()
        self.model = Transformer(config, cfg.precision, self.device, seed=None, kv=cfg.kv)
        self.model.recompute = cfg.recompute
        self.optimizer = fp8.AdamW(self.model.weights(), (0.9, 0.95), 1e-8, cfg.weight_decay,
                                   decay=lambda name: not name.endswith(("norm", "bias")),
                                   states=STATES[cfg.states])
        self.optimizer.load(model_file.read_tensors(folder, config) if cfg.model
                            else self.model.random_tensors(cfg.seed))
        self.sampler = Sampler(self.model, verbose=True)
        self.inv_temp = torch.tensor([1.0 / cfg.temperature], device=self.device)
        hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) == (9, 0)
        promised = cfg.precision == "fp8" and (hopper or self.device.type == "cpu")
        self.exact = cfg.exact or ("stop" if promised else "warn")

    # ---- problems and sequences

    def encode_prompt(self, example):
        """Ids of a problem: by the chat template, or as plain text where there is none (a base model)."""
        if self.tokenizer.template is not None:
            return self.tokenizer.chat([{"role": "user", "content": example.prompt}])
        return self.tokenizer.encode(example.prompt, parse_special=False)

    def encode_solution(self, example):
        refuse(example.solution is None,
               f"--sft-steps={self.cfg.sft_steps} learns from solutions, but the answer to "
               f"{example.prompt[:60]!r} has none before a last line '#### ...': --sft-steps=0")
        return self.tokenizer.encode(example.solution, parse_special=False) + self.tokenizer.eos_ids[:1]

    def problems(self, first, count):
        return [self.task.train(i) for i in range(first, first + count)]

    def text(self, ids):
        return self.tokenizer.decode([i for i in ids if i not in self.tokenizer.eos_ids])

    def leave_out_long_problems(self, config):
        """Those whose completion may not fit the context: said now, not cut in silence later. Ids that the
        model does not have are refused. -> tokens to feed of the longest sequence of those that stay"""
        cfg, most, task, longest = self.cfg, config.max_position_embeddings, self.task, 0
        refuse(not self.tokenizer.eos_ids, f"{cfg.model}: no file names an end-of-text id, so no completion "
                                           "would end: put eos_token_id into generation_config.json")
        drawn = not hasattr(task, "rows")    # as many as one likes: the held-out ones stand in for them
        for examples in [task.heldout] if drawn else [task.heldout, task.rows]:
            learned = cfg.sft_steps and (drawn or examples is task.rows)      # held-out ones may have none
            prompts = [self.encode_prompt(e) for e in examples]
            solutions = [self.encode_solution(e) if learned else [] for e in examples]
            sizes = [len(prompt) + max(cfg.max_new_tokens, len(solution))
                     for prompt, solution in zip(prompts, solutions)]
            fits = [size <= most for size in sizes]
            left_out = fits.count(False)
            what = (f"{left_out} of {len(fits)} problems, with --max-new-tokens={cfg.max_new_tokens} or "
                    f"their solution, do not fit the {most} tokens of the model")
            refuse(not any(fits) or drawn and left_out, f"{what}: lower --max-new-tokens, or give "
                   + ("a lower --difficulty" if drawn else "shorter ones"))
            if left_out:
                print(f"note: {what}: they are left out")
            examples[:], prompts = itertools.compress(examples, fits), list(itertools.compress(prompts, fits))
            try:
                check_request(config, prompts, 1, cfg.max_new_tokens, 1.0, cfg.seed,
                              self.tokenizer.eos_ids, None)
            except ValueError as error:
                raise ValueError(f"{cfg.model or 'the small model'}, problems of --task={cfg.task}: {error}")
            longest = max(longest, *itertools.compress(sizes, fits))
        return longest - 1                   # the last one has nothing to predict

    def estimate_memory(self, config):
        """What an update and a checkpoint take, from the shapes alone: refuse now what can never fit."""
        cfg = self.cfg
        self.parts = memory(config, cfg, max(cfg.micro_tokens, self.longest))
        self.update_needs = transient(self.parts)
        weights = self.parts["gradients"] // 4            # those are FP32
        self.checkpoint_bytes = (3 * STATES[cfg.states].itemsize + 2) * weights
        if self.device.type == "cuda":
            room, least = torch.cuda.mem_get_info(self.device)[1], memory(config, cfg, self.longest)
            refuse(sum(least.values()) > room, f"this takes {by_part(least)}, the GPU has {gib(room)}: "
                   + advice(config, cfg, room, self.longest))

    # ---- phases

    def sample(self, prompts, n, temperature, keys):
        """n completions of each prompt. Every rank samples its part and has all; `keys` names the noise."""
        rank, count, ours = self.ranks.rank, self.ranks.count, Rollout()
        first, end = len(prompts) * rank // count, len(prompts) * (rank + 1) // count
        if first < end:
            ours = self.sampler.generate(
                prompts[first:end], n, self.cfg.max_new_tokens, temperature, self.cfg.seed,
                self.tokenizer.eos_ids, keys=keys[first * n:end * n])
        if count == 1:
            return ours
        ours = ours.tokens, [logp.tolist() for logp in ours.logprobs], ours.finish
        tokens, logprobs, finish = (sum(parts, []) for parts in zip(*self.ranks.gather(ours)))
        return Rollout(tokens, [torch.tensor(logp) for logp in logprobs], finish)      # JSON keeps every bit

    def rollout(self, prompts):
        """A group for each prompt. A completion's noise is keyed by its running number in the whole run.

        Pages and graphs stay for the next step if the update fits beside them. Otherwise they are freed, and
        made anew each step: the update's own memory goes back to the sampler in its next `generate`.
        """
        cfg, count = self.cfg, self.cfg.prompts * self.cfg.samples
        if cfg.kl:
            self.reference_model()           # loaded now: later the sampler's pages may have taken its place
        keys = range(self.step * count, (self.step + 1) * count)
        rollout = self.sample(prompts, cfg.samples, cfg.temperature, keys)
        hand_over(self.sampler, self.update_needs)
        return rollout

    def learning_rate(self, step):
        warm = min(1.0, (step + 1) / max(1, self.cfg.warmup))
        return self.cfg.lr * warm * (1.0 - self.cfg.lr_decay * step / self.cfg.steps)

    def supervised_step(self, step):
        """One AdamW step on the mean -log p of solutions. -> loss, finite flag, both still on the device."""
        cfg = self.cfg
        examples = self.problems(step * cfg.sft_batch, cfg.sft_batch)
        pairs = [(self.encode_prompt(e), self.encode_solution(e)) for e in examples]
        total = sum(len(completion) for _, completion in pairs)
        mine = self.ranks.deal([fed(pair) for pair in pairs])
        loss_sum, one = torch.zeros((), device=self.device), torch.ones(1, device=self.device)
        for batch in micro_batches([pairs[i] for i in mine], cfg.micro_tokens):
            loss = -score(self.model, batch, one).sum() / total
            loss.backward()
            loss_sum += loss.detach()
        self.ranks.sum_(self.optimizer.grads)
        # The second half of the phase cools down linearly.
        lr = cfg.sft_lr * min(1.0, (step + 1) / 20, 2 * (1 - step / cfg.sft_steps))
        return self.ranks.sum_(loss_sum), self.optimizer.step(lr, cfg.grad_clip)[1]

    @torch.no_grad()
    def no_grad_scores(self, model, sequences):
        parts = [score(model, b, self.inv_temp) for b in micro_batches(sequences, self.cfg.micro_tokens)]
        return torch.cat([torch.empty(0, device=self.device)] + parts)    # also when all were dropped

    def update_batches(self, prompts, rollout, advantages):
        """A rollout as `updates` batches of whole groups: dicts of this rank's sequences, their places in the
        rollout ("index") and tensors (N,), a value for each token of their completions. "tokens" and "fed"
        count the completion tokens and the tokens fed of all ranks.
        """
        cfg, n, batches = self.cfg, self.cfg.samples, []
        pairs = [(prompts[i // n], tokens) for i, tokens in enumerate(rollout.tokens)]
        equal = [not group.any() for group in advantages.view(-1, n)]
        kept = [i for i in range(len(pairs)) if not (cfg.drop_equal and equal[i // n])
                and not (cfg.drop_truncated and rollout.finish[i] == "length")]
        for u in range(cfg.updates):
            whole = [i for i in kept if i // n % cfg.updates == u]
            tokens, sizes = sum(len(pairs[i][1]) for i in whole), [fed(pairs[i]) for i in whole]
            index = [whole[k] for k in self.ranks.deal(sizes)]
            sequences = [pairs[i] for i in index]
            lengths = torch.tensor([len(completion) for _, completion in sequences], dtype=torch.int64)
            sampler = torch.cat([torch.empty(0)] + [rollout.logprobs[i] for i in index]).to(self.device)
            batch = {"index": index, "sequences": sequences, "tokens": tokens, "fed": sum(sizes),
                     "sampler": sampler, "old": None, "share": None, "ref": None,
                     "advantages": advantages[index].repeat_interleave(lengths).to(self.device)}
            # The denominator of the ratio. In `fp8` the sampler's log-probs are the trainer's. Elsewhere a
            # pass computes them, unless one update is all: then its own log-probs are the old ones (None).
            if cfg.precision == "fp8":
                batch["old"] = sampler
            elif cfg.updates > 1:
                batch["old"] = self.no_grad_scores(self.model, sequences)
            if cfg.loss_mean == "completion":
                batch["share"] = grpo.mean_share(lengths, tokens, len(whole)).to(self.device)
            if cfg.kl:
                batch["ref"] = self.no_grad_scores(self.reference_model(), sequences)
            batches.append(batch)
        return batches

    def update(self, batch, metrics):
        """One optimizer update. The loss is divided by the token count of the whole update, known beforehand.

        A rank without a sequence in it adds zeros to the gradient. -> this rank's trainer's log-probs (N,)
        before the update, gradient norm and finite flag, still on the device.
        """
        cfg, at, seen = self.cfg, 0, [torch.empty(0, device=self.device)]
        for micro in micro_batches(batch["sequences"], cfg.micro_tokens):
            logp = score(self.model, micro, self.inv_temp)
            part = slice(at, at := at + logp.numel())
            sampler, advantages, old, share, ref = (
                None if batch[name] is None else batch[name][part]
                for name in ("sampler", "advantages", "old", "share", "ref"))
            old = logp.detach() if old is None else old
            loss, sums = grpo.policy_loss(
                logp, old, advantages, batch["tokens"], clip_low=cfg.clip_low, clip_high=cfg.clip_high,
                weights=grpo.truncated_weights(old, sampler, cfg.tis) if cfg.tis else None, share=share,
                ref_logp=ref, kl_coef=cfg.kl)
            loss.backward()
            metrics.add(logp.numel(), sums)
            seen.append(logp.detach())
        if not batch["tokens"]:                      # all dropped: nothing to learn, momentum must not act
            return seen[0], torch.zeros(()), torch.tensor(True)
        self.ranks.sum_(self.optimizer.grads)
        norm, finite = self.optimizer.step(self.learning_rate(self.step), cfg.grad_clip)
        return torch.cat(seen), norm, finite

    def reference_model(self):
        """The policy that GRPO started from, loaded by the first step with a KL term and never before.
        After a supervised phase it is that policy to BF16 rounding: the folder holds no FP32 masters."""
        if self.reference is None:
            folder = self.cfg.model if self.cfg.model and not self.cfg.sft_steps else self.out / "start"
            self.reference = Transformer.from_pretrained(folder, self.cfg.precision, self.device,
                                                         kv=self.cfg.kv)
        return self.reference

    def check_exact(self, batch, trainer):
        """The contract: sampler and trainer computed the same 32 bits for every token of the first update."""
        at = None if self.exact == "off" else grpo.first_difference(batch["sampler"], trainer)
        if at is None:
            return
        places = [(i, len(prompt) + j) for i, (prompt, completion) in zip(batch["index"], batch["sequences"])
                  for j in range(len(completion))]
        sequence, position = places[at]
        text = (f"log-probs differ first at sequence {sequence}, position {position}: "
                f"sampler {batch['sampler'][at].item():.9g}, trainer {trainer[at].item():.9g}")
        if self.exact == "stop":
            raise RuntimeError(f"step {self.step}: {text}.\nThe exact flow is broken; --exact=warn goes on")
        self.exact = "off"
        expected = "" if self.cfg.precision == "fp8" else f"expected in {self.cfg.precision}; "
        print(f"note: {text} ({expected}said once, the dlogp columns go on)")

    def evaluate(self, when):
        """Accuracy on held-out problems, printed and logged: greedy, or pass@1 and pass@k of k samples.

        pass@k: the share of problems with a right one among k. The noise of these samples is keyed by
        negative numbers, which no training sample has, and the same in each evaluation.
        """
        cfg, k, heldout, t0 = self.cfg, self.cfg.eval_samples, self.task.heldout, time.time()
        rollout = self.sample([self.encode_prompt(e) for e in heldout], k, cfg.temperature if k > 1 else 0.0,
                              keys=range(-1, -1 - len(heldout) * k, -1))
        rewards = [heldout[i // k].reward(self.text(ids)) for i, ids in enumerate(rollout.tokens)]
        right, seconds = torch.tensor(rewards, dtype=torch.float64).view(-1, k), time.time() - t0
        accuracy, some = right.mean().item(), right.amax(1).mean().item()
        error = right.mean(1).std(correction=0).item() / math.sqrt(len(right))     # of the mean over problems
        passed = f"{accuracy:.1%}" + (f" (pass@1), {some:.1%} (pass@{k})" if k > 1 else "")
        how = f"at temperature {cfg.temperature:g}" if k > 1 else "greedy"
        print(f"held-out accuracy {when}: {passed} of {len(right)} problems, {how} ({seconds:.1f} s)")
        self.log({"kind": "eval", "step": self.step, "accuracy": accuracy, "standard_error": error,
                  "problems": len(right), "samples": k, "pass_k": some,
                  "truncated": rollout.finish.count("length") / len(rewards), "seconds": seconds})

    # ---- disk

    def prepare_folder(self):
        """The run folder, writable, with room for a checkpoint."""
        out, takes = self.out, self.checkpoint_bytes
        refuse(not self.cfg.resume and checkpoints(out),
               f"--out={out} holds checkpoints: add --resume, or give another folder")
        try:
            (out / "source").mkdir(parents=True, exist_ok=True)
            (out / "log.jsonl").touch()
        except OSError as error:
            raise OSError(f"--out={out} cannot be written ({error.strerror}): give another folder")
        if (free := shutil.disk_usage(out).free) < takes:
            raise OSError(f"--out={out} has {gib(free)} free, a checkpoint takes {gib(takes)}: make room, or "
                          "give another folder")

    def keep_flags(self):
        """The flags and sources of the run, in its folder, once a resume was not refused. Flags come from the
        command line: what differs from the run before is said."""
        path, flags = self.out / "config.json", dataclasses.asdict(self.cfg)
        before = json.loads(path.read_text()) if path.exists() else {}
        changed = [f"{k}={v} (was {before[k]})" for k, v in flags.items()
                   if k not in ("resume", "debug", "out") and before.get(k, v) != v]
        if changed:
            print(f"note: the run in {self.out} goes on with other flags: {', '.join(changed)}")
        for name in ("model.py", "fp8.py", "rollout.py", "grpo.py", "train.py"):
            shutil.copy(HERE / name, self.out / "source" / name)
        write(path, json.dumps(flags, indent=1))

    def log(self, record):
        """One JSON object a line, in ASCII, so no odd text can break it; NaN and Inf become null."""
        if self.ranks.rank:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with open(self.out / "log.jsonl", "a") as f:
            f.write(json.dumps(record) + "\n")
        self.logged += 1
        if self.cfg.wandb:
            import wandb
            if wandb.run is None:
                wandb.init(project=self.cfg.wandb, dir=self.out, config=dataclasses.asdict(self.cfg))
                wandb.define_metric("*", step_metric="step")      # an evaluation shares its step with others
            wandb.log({k if k == "step" else f"{record['kind']}/{k}": v for k, v in record.items()
                       if isinstance(v, (int, float))})

    def save(self):
        """A checkpoint of this step, unless there is one: rank 0 writes, the others wait. -> its folder"""
        out, folder, part = self.out, self.out / f"step-{self.step:06d}", self.out / ".saving"
        if self.ranks.rank == 0:
            shutil.rmtree(part, ignore_errors=True)                  # what a killed save or removal has left
            if not folder.is_dir():
                self.write_checkpoint(part, folder)
            for old in checkpoints(out)[:-self.cfg.keep]:
                # By a rename first: what is left of a removal that is killed must not look like a checkpoint.
                os.rename(out / old, part)
                shutil.rmtree(part)
        self.ranks.gather(None)
        return folder

    def write_checkpoint(self, part, folder):
        """The policy as a Hugging Face folder, optimizer and state of the run beside it. All is written into
        `part`, and only when the disk itself has it, the rename makes it a checkpoint: whole or not at all,
        also if the power fails."""
        if not all(master.isfinite().all() for master in self.optimizer.master.values()):
            raise RuntimeError("the weights are not finite, the last checkpoint stays: lower --lr")
        try:
            self.model.save_pretrained(part, self.optimizer.master.items())
            self.tokenizer.save(part)
            save_file(self.optimizer.state(), part / "optimizer.safetensors")
            state = {"step": self.step, "skipped": self.skipped, "silent": self.silent,
                     "logged": self.logged, "now": self.tokenizer.now.isoformat()}
            (part / "state.json").write_text(json.dumps(state))
            sync(part, self.out)
            os.rename(part, folder)
            sync(self.out)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)                  # it would keep a full disk full
            raise OSError(f"{folder} of {gib(self.checkpoint_bytes)} cannot be written ({error}): make room, "
                          "then the same command with --resume goes on from the one before") from None

    def restore(self):
        """Go on from the newest checkpoint, if any: same weights, moments, counters, so the same bits."""
        names = checkpoints(self.out) if self.cfg.resume else []
        folder, logged = self.out / names[-1] if names else None, 0
        if folder:
            try:
                tensors = load_file(folder / "optimizer.safetensors")
                state = json.loads((folder / "state.json").read_text())
                self.step, self.skipped, self.silent = state["step"], state["skipped"], state["silent"]
                self.tokenizer.now, logged = datetime.datetime.fromisoformat(state["now"]), state["logged"]
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                raise ValueError(f"{folder} is damaged ({error!r}): remove it, then resume") from None
            self.optimizer.load_state(tensors)
        if self.ranks.rank == 0:       # what the checkpoint does not know is run, and logged, again
            lines = (self.out / "log.jsonl").read_text().splitlines(keepends=True)[:logged]
            write(self.out / "log.jsonl", "".join(lines))
            self.logged = len(lines)
        return folder


def small_config(cfg, tokenizer):
    """A Qwen3 of the asked size, whose vocabulary is the tokenizer's: heads of 64, two to a key if even."""
    heads = max(1, cfg.width // 64)
    return model_file.Config(
        model_type="qwen3", vocab_size=tokenizer.vocab_size, hidden_size=cfg.width,
        intermediate_size=3 * cfg.width, num_hidden_layers=cfg.layers,
        num_attention_heads=heads, num_key_value_heads=heads if heads % 2 else heads // 2, head_dim=64,
        max_position_embeddings=16384,       # traces of thousands of bytes fit
        rope_theta=10000.0, tie_word_embeddings=True, eos_token_id=tokenizer.eos_ids)


# ---- what a person sees --------------------------------------------------------------------------

COLUMNS = (" step  reward  solved  length |   mean |d|    max |d| | grad norm  entropy      loss "
           "|  roll s   tok/s | train s   tok/s |    GiB")


def step_line(r):
    """A record of the log under COLUMNS. |d| is the gap between the log-probs of sampler and trainer."""
    return (f"{r['step']:5d} {r['reward']:7.3f} {r['solved']:7.1%} {r['length']:7.1f} | "
            f"{r['mean_dlogp']:10.2e} {r['max_dlogp']:10.2e} | "
            f"{r['grad_norm']:9.3f} {r['entropy']:8.3f} {r['loss']:9.2e} | "
            f"{r['t_rollout_s']:7.2f} {r['rollout_tok_per_s']:7.0f} | "
            f"{r['t_train_s']:7.2f} {r['train_tok_per_s']:7.0f} | {r['mem_gib']:6.1f}")


def git_commit():
    """Short hash of the sources' commit, or "-" where there is no git or no repository."""
    if not shutil.which("git"):
        return "-"
    command = ["git", "-C", HERE, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "-"


def header(run, resumed):
    """What runs, on what, what it needs, what comes and how long it may take: the first lines of a log."""
    cfg, c, cuda = run.cfg, run.model.config, run.device.type == "cuda"
    name = torch.cuda.get_device_name(run.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    name += f", {run.ranks.count} ranks" if run.ranks.count > 1 else ""
    triton = fp8.triton.__version__ if fp8.triton else "absent"
    print(f"{name} | torch {torch.__version__}, triton {triton}, Python {platform.python_version()} | "
          f"commit {git_commit()}")
    if not cuda:
        print(f"{'--device=cpu' if torch.cuda.is_available() else 'no CUDA device found'}: "
              f"{cfg.model or 'a toy size'} runs on the CPU, FP8 by its torch reference: exact, and slow")
    count = sum(w.shape.numel() for w in run.model.weights().values())
    print(f"{c.model_type}, {count / 1e6:.1f}M parameters, {c.num_hidden_layers} layers of {c.hidden_size}, "
          f"vocabulary {c.vocab_size} | precision {cfg.precision}, kv {cfg.kv}, exact={run.exact} | "
          f"run folder {cfg.out}")
    if cuda:
        room = torch.cuda.mem_get_info(run.device)[1]
        print(f"memory of an update: {by_part(run.parts)} of {gib(room)}; the sampler's pages take what they "
              "need of the rest")
        if sum(run.parts.values()) > room:
            print(f"warning: that is too much: {advice(c, cfg, room, run.longest)}")
    print(" ".join(f"{k}={v}" for k, v in dataclasses.asdict(cfg).items() if v not in ("", None)))
    if resumed:
        print(f"resumed from {resumed}")
    elif cfg.resume:
        print(f"note: no checkpoint in --out={cfg.out}: this starts anew")
    sft = f"{cfg.sft_steps} supervised steps, then " if cfg.sft_steps and not resumed else ""
    print(f"plan: {sft}{cfg.steps} GRPO steps of {cfg.prompts} problems x {cfg.samples} completions of up to "
          f"{cfg.max_new_tokens} tokens;\n      |d| is the gap between the log-probs of sampler and trainer"
          + (" | kernels are compiled when first used: a minute or two, then cached" if cuda else ""))
    if cuda:
        rollout, update = longest_step(run, count)
        print(f"      at most about {rollout + update:.0f} s a step: rollout {rollout:.0f}, update "
              f"{update:.0f} (on an H200, if every completion takes its full length)")


def longest_step(run, count):
    """Seconds of a rollout and an update if no completion ends early, of a model of `count` parameters.
    At half of what an H200 can do: in an update by its operations, in a decode step by the bytes it reads."""
    cfg, c, completions = run.cfg, run.model.config, run.cfg.prompts * run.cfg.samples / run.ranks.count
    tokens, waves = completions * run.longest, max(1, completions / MAX_SLOTS["cuda"])
    passes = (4 if cfg.recompute else 3) + (cfg.updates > 1 and cfg.precision != "fp8") + (cfg.kl > 0)
    weights = run.parts["weights"] / (1 + (cfg.kl > 0))                  # the reference samples nothing
    pages = (2 if cfg.kv == "fp8" else 4) * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    step = (weights + pages * tokens / 2 / waves) / (0.5 * 4.8e12)
    return waves * cfg.max_new_tokens * max(step, 1e-3), 2 * tokens * count * passes / (0.5 * 800e12)


def summary(run):
    """The whole run, resumed or not, in a few lines: from its log."""
    records = [json.loads(line) for line in (run.out / "log.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    if not steps:
        return
    total = lambda key: sum(r[key] for r in steps)
    accuracy = [r["accuracy"] for r in records if r["kind"] == "eval"]
    print(f"summary: {len(steps)} steps, {steps[-1]['skipped']} updates skipped; {total('tokens'):,} tokens "
          f"sampled, of whose log-probs {total('differing_tokens'):,.0f} differ from the trainer's\n"
          f"         reward {steps[0]['reward']:.3f} -> {steps[-1]['reward']:.3f}, held-out accuracy "
          f"{accuracy[0]:.1%} -> {accuracy[-1]:.1%}\n"
          f"         rollout {total('t_rollout_s'):.0f} s at {total('tokens') / total('t_rollout_s'):,.0f} "
          f"tok/s, training {total('t_train_s'):.0f} s")


# ---- memory --------------------------------------------------------------------------------------

def memory(c, cfg, tokens):
    """What an update holds on the GPU, in bytes by part: model config c, micro-batches of `tokens` tokens."""
    C, F, L, o = c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads * c.head_dim
    qkv = o + 2 * c.num_key_value_heads * c.head_dim
    matrices, tables = L * C * (qkv + o + 3 * F), c.vocab_size * C * (2 - c.tie_word_embeddings)
    weights = matrices * {"bf16": 2, "fp8-rollout": 3, "fp8": 1}[cfg.precision] + tables * 2
    # A BF16 master of weights that are read in BF16 is the weight itself.
    shared = 0 if cfg.states == "fp32" else 2 * (tables + matrices * (cfg.precision != "fp8"))
    # In BF16, a token: both residual sums; qkv before and after RoPE; attention's output; gate and up. In FP8
    # a scale for 128 values of what is multiplied, too. Of a layer that is run again only its input stays, as
    # two summands.
    layer = 2 * (2 * C + 2 * qkv + o + 2 * F) + (2 * C + o + F) // 32 * (cfg.precision == "fp8")
    kept = 4 * C if cfg.recompute else layer
    # The larger of what the head needs, a chunk's gradient of the logits among it, and what the backward pass
    # of a layer holds beside what was kept: gradients, codes in both directions.
    chunk = 2 * model_file.TokenLogprobsFunction.CHUNK * c.vocab_size
    work = max(chunk + tokens * 12 * C, tokens * (8 * F + layer * cfg.recompute))
    return {"CUDA and its libraries": 2**30, "weights": weights * (1 + (cfg.kl > 0)),
            "masters and moments": 3 * STATES[cfg.states].itemsize * (matrices + tables) - shared,
            "gradients": 4 * (matrices + tables),
            f"activations of {tokens:,} tokens": tokens * L * kept, "work space": work}


def transient(parts):
    """Of `memory`, what an update takes beside all that stays, a tenth more: activations and work space."""
    return 1.1 * sum(list(parts.values())[-2:])


def fitting(c, cfg, room, longest):
    """The flags to change, least first, for an update to fit into `room` bytes: a dict. None: no way.

    A micro-batch holds one sequence or more, so it cannot be smaller than the longest. Below 8,192 tokens
    the products get slow: that comes last.
    """
    changes = {}, {"recompute": True}, {"states": "bf16"}, {"recompute": True, "states": "bf16"}
    most = max(cfg.micro_tokens, longest)
    for least, change in itertools.product((min(8192, cfg.micro_tokens), 0), changes):
        new = dataclasses.replace(cfg, **change)
        for tokens in range(most, max(longest, least) - 1, -256):
            if sum(memory(c, new, tokens).values()) <= room:
                return change | ({"micro_tokens": tokens} if tokens < cfg.micro_tokens else {})
    return None


def advice(c, cfg, room, longest):
    """fitting() in words."""
    change = fitting(c, cfg, room, longest)
    if change is None:
        return "lower --max-new-tokens, or take a smaller model"
    flags = " ".join(flag(k) + ("" if v is True else f"={v}") for k, v in change.items())
    return f"give {flags}" if flags else "free the GPU of other processes"


def hand_over(sampler, needed):
    """Before an update that needs so many bytes: free the sampler's pages and graphs if less is left.

    4 GiB more are asked for: idle memory is not one piece, and a new capture is cheaper than a lost run.
    """
    if sampler.device.type == "cuda":
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()     # PyTorch's, from earlier
        if torch.cuda.mem_get_info()[0] + idle < needed + 4 * 2**30:
            sampler.release()


def gib(size):
    return f"{size / 2**30:.1f} GiB"


def by_part(parts):
    sizes = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
    return f"{gib(sum(parts.values()))} ({sizes})"


# ---- ranks: data parallel over the GPUs of one host ------------------------------------------------

def world_size():
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1     # torchrun sets both


class Ranks:
    """This process among those that torchrun started; alone, it makes no call to torch.distributed.

    Every rank holds the whole model and applies the same summed gradient, so weights stay equal to the bit.
    Each samples for its share of the prompts; the completions are then known to all, and dealt out again, by
    length, to be trained on. So many a sequence is scored by another rank than sampled it: the check of
    exactness sees any drift between ranks. A run's state does not depend on their number.
    """

    def __init__(self, device):
        self.count = world_size()
        self.rank = int(os.environ["RANK"]) if self.count > 1 else 0
        self.device = torch.device("cuda", self.rank) if device == "cuda" else torch.device(device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)     # kernels and graphs go to the current device
        if self.count > 1:
            # Long enough for what the others wait for: a long completion, or rank 0 writing a checkpoint. A
            # rank that dies is not waited for at all, as torchrun then ends the others.
            dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=1),
                                    device_id=self.device if cuda else None)
        if self.rank:
            sys.stdout = open(os.devnull, "w")     # rank 0 speaks for all; errors go to stderr

    def sum_(self, tensor):
        """Add up a tensor over all ranks, in place. On a GPU the host does not wait."""
        if self.count > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError:
                if self.device.type == "cpu":
                    time.sleep(10)   # gloo: another rank is gone. It has said why; torchrun ends this one now
                raise
        return tensor

    def gather(self, value):
        """Every rank's value, whatever JSON can hold, by rank. Waits until all are here. What comes is data
        and never runs, unlike objects as torch exchanges them."""
        if self.count == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        lengths = self.sum_(lengths).tolist()
        # Each rank fills a row of its own, so the sum is a table of all texts.
        table = torch.zeros(self.count, max(lengths), dtype=torch.uint8, device=self.device)
        table[self.rank, :len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(row[:n].tobytes()) for row, n in zip(self.sum_(table).cpu().numpy(), lengths)]

    def deal(self, sizes):
        """Indices of this rank's share of the work: the largest goes first, each to the least loaded rank."""
        loads, mine = [0] * self.count, []
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):           # equal ones stay in order
            rank = loads.index(min(loads))
            loads[rank] += sizes[i]
            if rank == self.rank:
                mine.append(i)
        return sorted(mine)


# ---- files ---------------------------------------------------------------------------------------

def write(path, text):
    """Write or replace a file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def sync(*folders):
    """Make the disk hold what was written: the files in these folders, and the names of the files."""
    for folder in folders:
        for path in [entry.path for entry in os.scandir(folder) if entry.is_file()] + [folder]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def checkpoints(folder):
    """Names of the whole checkpoints in a run folder, oldest first."""
    return sorted(path.name for path in Path(folder).glob("step-*"))


# ---- the command line ----------------------------------------------------------------------------

def main(argv=None):
    cfg = parse(sys.argv[1:] if argv is None else argv)
    run = Run(cfg)
    try:
        train(run)
    except torch.OutOfMemoryError:
        room = torch.cuda.max_memory_reserved(run.device)        # no more than this could be had
        raise RuntimeError(f"out of GPU memory at {gib(room)}, an update takes about {by_part(run.parts)}: "
                           f"{advice(run.model.config, cfg, 0.95 * room, run.longest)}\n"
                           "Whole checkpoints stay, the same command with --resume goes on") from None


def fail(text):
    """End this process with its error. A rank exits at once and clears nothing up: torchrun ends the rest."""
    if world_size() == 1:
        sys.exit(text)
    rank = int(os.environ["RANK"])
    time.sleep(rank > 0)     # an error of all ranks is said once: when rank 0 is gone, torchrun ends the rest
    sys.stdout.flush()
    print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted: whole checkpoints stay, the same command with --resume goes on from the newest")
    except Exception as error:
        if "--debug" in sys.argv and world_size() == 1:
            raise
        fail(traceback.format_exc() if "--debug" in sys.argv else
             explain(error, "--max-new-tokens, or take a smaller model"))
    if world_size() > 1:
        dist.destroy_process_group()
