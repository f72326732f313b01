"""
Everything that is claimed in numbers: exactness first, then the speed of each kernel beside a library's.

    python bench.py exact                       # sampler and trainer, bit by bit; exits with 1 if one differs
    python bench.py gemm quant block optimizer  # products, quantizers, a whole layer, AdamW: random data
    python bench.py attention head              # the kernels that stay in BF16
    python bench.py decode rollout              # steps of the sampler at real shapes, whole batches
    python bench.py train step                  # updates at real shapes; rollout and update together
    python bench.py rules                       # what each rule of the numerics contract costs
    python bench.py mismatch FOLDER ...         # what lifting it does, on these checkpoints -> a figure
    python bench.py moves [FOLDER ...]          # what an update of the policy changes -> a figure
    python bench.py plot runs/a runs/b          # curves of training -> assets/runs.png

Figures need matplotlib. Each section prints a table; the last line on stdout is one JSON object, whose rows
are merged into --out (default assets/bench_h200.json, on an H200 alone). --quick runs fewer sizes and merges
only where --out names a file.

How to read a row: `us` is the median of one call, and `spread` the distance from the 10th to the 90th
percentile as a share of it. `of_limit` is the share of what the hardware allows: the larger of the time for
the operations (dense tensor peak) and for the bytes that have to move (copy rate, measured in the same run).
`x_name` is the time of that alternative over ours: above 1, ours is faster. `plain` is the readable Triton
kernel beside a faster one, `bf16` cuBLAS (for `block` our own layer in BF16), `cublaslt` its blockwise FP8
product, `deepgemm` the package of that name, which is compared with where it is installed (`_rows`: both
operands of WGrad have scales for rows, none for blocks), `sdpa` torch's FlashAttention-2, `cudnn` cuDNN's
attention, `torch` what torch offers without kernels of one's own. Inputs rotate over more memory than the L2
cache holds.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8
import grpo
import model as model_file
import train
from model import (PAGE, Config, Transformer, attention, code_places, empty_cache, pack, paged_attention,
                   sample, token_logprobs)
from rollout import BUCKETS, Parser, Sampler, explain, pages_for
from train import git_commit, score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ASSETS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets")
FP8_PEAK, BF16_PEAK = 1979e12, 989e12     # dense tensor operations a second of an H100 SXM or H200
COLD = 150e6                              # bytes that no L2 cache holds (50 MB on an H200)

# ---- tables and the JSON file ------------------------------------------------------------------------------


class Table:
    """Rows of one section, printed and added to `rows` as they come: a run that dies keeps its results."""

    def __init__(self, section, rows, *columns, key="shape"):
        self.section, self.rows, self.columns, self.key = section, rows, columns, key
        self.commit = git_commit()
        if "of_limit" in columns:
            copy_rate()                          # measured now, so that its line stays out of the table
        print(f"\n{section:18} {key:34} " + " ".join(f"{c:>9}" for c in columns))

    def add(self, case, where, **values):
        """One row. Values under `columns` are printed, all are kept; None stands for not measured."""
        row = {"section": self.section, "case": case, self.key: where, "commit": self.commit}
        row |= {name: value for name, value in values.items() if value is not None}
        if "x_bf16" in self.columns and "tok_per_s" in row:    # over the same work in BF16, if it ran
            for base in [*self.rows, row]:
                if (all(base.get(k) == row[k] for k in ("section", "case", self.key))
                        and base["precision"] == base.get("kv", "bf16") == "bf16"):
                    row["x_bf16"] = row["tok_per_s"] / base["tok_per_s"]
        self.rows.append(row)
        cells = " ".join(f"{show(row.get(c)):>{max(9, len(c))}}" for c in self.columns)
        print(f"{case:18} {where:34} {cells}", flush=True)

    def add_times(self, case, where, times, limit, flops=None, bytes_moved=None, **values):
        """One row of {name: (us, spread)}, "ours" among them; `limit` is the least time possible, in us."""
        us, spread = times["ours"]
        others = {name: other for name, (other, _) in times.items() if name != "ours"}
        self.add(case, where, us=us, tflops=flops and flops / us / 1e6,
                 tb_per_s=bytes_moved and bytes_moved / us / 1e6, of_limit=limit / us, spread=spread,
                 **{f"x_{name}": other / us for name, other in others.items()},
                 **{f"{name}_us": other for name, other in others.items()}, **values)

    def means(self):
        """One more row for each case: the geometric means of its ratios."""
        cases = {}
        for row in self.rows:
            if row["section"] == self.section:
                cases.setdefault(row["case"], []).append(row)
        for case, rows in cases.items():
            ratios = {name: [math.log(row[name]) for row in rows if name in row]
                      for name in self.columns if name.startswith("x_")}
            self.add(case, "geometric mean",
                     **{name: math.exp(sum(x) / len(x)) for name, x in ratios.items() if x})


def show(value):
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) < 0.005:
        return f"{value:.1e}" if value else "0"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def machine():
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)"
    packages = {"torch": torch, "triton": fp8.triton, "deep_gemm": optional("deep_gemm")}
    versions = {name: package.__version__ for name, package in packages.items() if package}
    return {"gpu": name, **versions}


def committed():
    """Whether results of this GPU are those that lie in assets."""
    return "H200" in machine()["gpu"]


note = functools.cache(print)                    # each message once


@functools.cache
def optional(name):
    """A package to compare with, which nothing here needs, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except (OSError, RuntimeError) as error:     # installed, but its libraries or its compiler are not found
        note(f"note: {name} cannot be loaded: {str(error).strip().splitlines()[0][:150]}")


def read_results(path):
    """The object in `path`, or an empty one. Rows of two GPUs never share a file: they would be compared."""
    if not os.path.exists(path):
        return {"rows": []}
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
        found["rows"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result of bench.py ({error!r}): move it away, or give another --out")
    mine = machine()["gpu"]
    if found.get("gpu") != mine:
        raise ValueError(f"{path} holds rows of '{found.get('gpu')}', this is '{mine}': give another --out")
    return found


def merge(path, rows):
    """Puts `rows` into the file, in place of older rows about the same thing; written whole or not at all."""
    about = lambda r: tuple(r.get(k) for k in ("section", "case", "shape", "model", "precision", "kv"))
    new = {about(r): r for r in rows}
    kept = [r for r in read_results(path)["rows"] if about(r) not in new]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(machine() | {"rows": kept + list(new.values())}, f, indent=1)
        f.write("\n")
    os.replace(path + ".part", path)


# ---- timing ------------------------------------------------------------------------------------------------


def compare(contenders, graph=True, budget_s=0.1):
    """{name: calls} -> {name: (microseconds of one call, their spread)}, over repeated runs of all calls.

    The calls of one contender do the same work on different memory. They run back to back between two events,
    so that gaps of the host stay out: replayed from a CUDA graph, or, where autograd cannot be captured,
    launched ahead while the GPU sleeps. Contenders take turns: clocks fall under load, for all alike then.
    """
    torch.cuda.empty_cache()                     # the memory of earlier graphs
    ready = {name: prepare(calls, graph) for name, calls in contenders.items()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {name: [] for name in ready}
    for _ in range(min(max(int(budget_s / max(once for _, _, once in ready.values())), 7), 50)):
        for name, (run, count, once) in ready.items():
            torch.cuda._sleep(200_000 if graph else int(2e9 * once))     # in clocks, of at most 2 GHz
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / count)
    return {name: middle(x) for name, x in times.items()}


def prepare(calls, graph):
    """Calls, already or not yet compiled -> function that runs them all, their number, its seconds."""
    run = lambda: [call() for call in calls]
    for _ in range(2):                           # the first run compiles, the second takes its memory
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin           # host included
    # Between two events go 8 calls or 4 ms of them: a short kernel alone would cost less than the events.
    repeats = min(-(-8 // len(calls)), max(1, round(4e-3 / once)))
    calls, once = calls * repeats, once * repeats
    if not graph:
        return run, len(calls), once
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        kept = run()                             # alive, or the allocator would give all calls one output
    return lambda: (recorded.replay(), kept), len(calls), once


def middle(x):
    """-> median, distance from the 10th to the 90th percentile as a share of it."""
    x, n = sorted(x), len(x) - 1
    return x[len(x) // 2], (x[round(0.9 * n)] - x[round(0.1 * n)]) / x[len(x) // 2]


def timed(parts, repeats=3):
    """Seconds of each of the callables `parts`, which run in turn: the median of some runs, gaps included."""
    runs = []
    for _ in range(1 + repeats):                     # the first run compiles and takes its memory
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000)                   # the first launch is no part of it
        events[0].record()
        for part, event in zip(parts, events[1:]):
            part()
            event.record()
        events[-1].synchronize()
        runs.append([a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])])
    return [middle(x)[0] for x in zip(*runs[1:])]


def compile_ahead(calls):
    """Runs each call once, side by side: a kernel takes one core a second to compile, and there are many."""
    began = time.time()
    calls[0]()                                        # alone: it starts Triton
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda call: call(), calls))    # the list raises what a call raised
    torch.cuda.empty_cache()
    print(f"kernels compiled in {time.time() - began:.0f} s")


def checked(what, contenders, tolerance):
    """`contenders`, less those that refuse. A kernel is only worth timing if it computes the same thing.

    The first call of each returns one tensor or several, with a relative difference from ours of at most
    `tolerance`, a number or {name: number}; NaN fails too.
    """
    several = lambda x: [x] if isinstance(x, torch.Tensor) else x
    wants, kept = several(contenders["ours"][0]()), {"ours": contenders["ours"]}
    for name in [name for name in contenders if name != "ours"]:
        try:
            found = several(contenders[name][0]())
        except (RuntimeError, ValueError, NotImplementedError) as error:       # an empty column
            note(f"note: {name} is not measured everywhere: {str(error).strip().splitlines()[0][:150]}")
            continue
        limit = tolerance[name] if isinstance(tolerance, dict) else tolerance
        for got, want in zip(found, wants):
            got, want = got.float().flatten(), want.float().flatten()
            error = ((got - want).norm() / want.norm()).item()
            if not error <= limit:
                raise RuntimeError(f"{what}: {name}: relative difference {error:.2e} from ours, "
                                   f"expected <= {limit:.0e}")
        kept[name] = contenders[name]
    return kept


@functools.cache
def copy_rate():
    """Bytes a second of a large copy, read and written both counted: the ceiling of this very card.

    By a kernel, not by copy_: in a graph that is a memcpy node, which from 512 MiB on runs at 2.7 TB/s on an
    H200, where a kernel reaches 4.2 or more.
    """
    source = torch.randn(2**30, dtype=torch.bfloat16, device=DEVICE)          # 2 GiB
    target = torch.empty_like(source)
    us, _ = compare({"copy": [lambda: torch.mul(source, 1, out=target)]})["copy"]
    rate = 2 * source.nbytes / us * 1e6
    print(f"copy rate of this GPU: {rate / 1e12:.2f} TB/s")
    return rate


def limit_us(bytes_moved=0, flops=0, peak=BF16_PEAK):
    """The least time of a kernel that moves so many bytes and computes so much, in microseconds."""
    return max(bytes_moved and bytes_moved / copy_rate(), flops / peak) * 1e6


def randn(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE, requires_grad=grad)


# ---- Qwen3: the shapes of all that follows -----------------------------------------------------------------

# hidden size, query heads, MLP width, layers; 8 key/value heads of 128 everywhere
QWEN3 = {"0.6B": (1024, 16, 3072, 28), "1.7B": (2048, 16, 6144, 28), "4B": (2560, 32, 9728, 36),
         "8B": (4096, 32, 12288, 36)}
WHOLE = "1.7B", "4B", "8B"                # sizes of the sections that run whole models
VOCAB = 151936


def layer_shapes(size):
    """{layer: (N, K)}: output and input features of the four matrices of a block."""
    C, H, width, _ = QWEN3[size]
    return {"qkv": ((H + 16) * 128, C), "o": (C, H * 128), "gate_up": (2 * width, C), "down": (C, width)}


def free_earlier():
    """Gives back the memory of earlier models: a sampler and its graphs hold each other, and their model."""
    gc.collect()
    torch.cuda.empty_cache()


def config_fields(size):
    """What a config says of that size, ours and that of transformers; the head is untied at 8B only."""
    C, H, width, layers = QWEN3[size]
    return dict(vocab_size=VOCAB, hidden_size=C, intermediate_size=width, num_hidden_layers=layers,
                num_attention_heads=H, num_key_value_heads=8, head_dim=128, max_position_embeddings=20480,
                tie_word_embeddings=size != "8B")


def random_model(size, precision, kv="bf16", **changes):
    """Random weights, the same in every precision, made on the GPU."""
    free_earlier()
    model = Transformer(Config(**config_fields(size) | changes), precision, DEVICE, seed=None, kv=kv)
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)
    return model.load((name, 0.02 * draw(*w.shape) if len(w.shape) == 2 else 1 + 0.1 * draw(*w.shape))
                      for name, w in model.weights().items())


# ---- exact: the sampler's log-probs and the trainer's, as 32 bits ------------------------------------------

# Head sizes 64 and 128; 1, 3 and 7 query heads a group; widths that are and are not multiples of 128 (576
# with a KV width of 192 is SmolLM2's); head tied or not; bias (qwen2), q/k norm (qwen3), neither (llama).
# Products share their shapes where they can: most of the time goes to compiling.
# name: (family, hidden size, MLP width, query heads, KV heads, head size, tied)
EXACT_MODELS = {
    "llama 576, 9/3 x 64, tied": ("llama", 576, 480, 9, 3, 64, True),
    "qwen2 512, 14/2 x 64": ("qwen2", 512, 576, 14, 2, 64, False),
    "qwen3 512, 3/3 x 128, tied": ("qwen3", 512, 576, 3, 3, 128, True),
    "qwen3 512, 7/1 x 128": ("qwen3", 512, 576, 7, 1, 128, False),
}
# slots, completions, longest response allowed (to the first completion), longest prompt
EXACT_BATCHES = [(1, 9, 1024, 700), (7, 21, 2048, 700), (64, 129, 4096, 700), (300, 450, 4096, 700)]
EXACT_LONG = (16, 24, 16384, 700)        # for the last model alone: 16k tokens of response
EXACT_QUICK = [(1, 3, 20, 70), (7, 12, 80, 70)]


def exact_model(name, precision, kv, seed):
    """Weights that are not Gaussian: a quarter of the 128x128 blocks is scaled by 2^-12 .. 2^8, some are 0.

    Each band of 128 output rows is then brought to a size of its own, within 2^6: no band drowns the others.
    """
    family, hidden, width, H, G, D, tied = EXACT_MODELS[name]
    config = Config(vocab_size=2000, hidden_size=hidden, intermediate_size=width, num_hidden_layers=2,
                    num_attention_heads=H, num_key_value_heads=G, head_dim=D, max_position_embeddings=17408,
                    model_type=family, rope_theta=1e4, tie_word_embeddings=tied)
    model = Transformer(config, precision, DEVICE, seed=None, kv=kv)
    generator = torch.Generator().manual_seed(seed)
    widen = lambda x, shape: x.repeat_interleave(128, 0)[:shape[0]].repeat_interleave(128, 1)[:, :shape[1]]

    def tensors():
        for name, w in model.weights().items():
            x = torch.randn(w.shape, generator=generator)
            if name.endswith("norm"):
                x = x.exp()                              # wide scales in the activations too
            elif name.endswith("bias"):
                x = x * 0.3
            elif name in ("embedding", "head"):
                x = x * 0.03
            else:
                blocks = [-(-n // 128) for n in w.shape]
                dice = torch.rand(blocks, generator=generator)
                exponent = torch.randint(-12, 9, blocks, generator=generator)
                factor = torch.where(dice < 0.25, 2.0 ** exponent, torch.where(dice > 0.93, 0.0, 1.0))
                rms = factor.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
                size = 0.04 * 2.0 ** torch.randint(-4, 3, rms.shape, generator=generator)
                x = x * widen(factor * size / rms, w.shape)
            yield name, x
    return model.load(tensors())


class WatchedSampler(Sampler):
    """Keeps what the KV pages of some completions hold at the moment they are given back."""
    watched = range(6)

    def _vacate(self, seq):
        if seq.index in self.watched:
            self.seen[seq.index] = [tuple(pages[seq.pages] for pages in cache) for cache in self.pool.caches]
        super()._vacate(seq)


def by_key(cache):
    """A layer's pages as bytes, what belongs to one key side by side: (pages, G, PAGE, bytes) uint8 each."""
    shape = cache[0].shape[:3]
    if len(cache) == 4:                                 # codes lie in the order of the tensor core's operands
        places = code_places(cache[0].shape[3], cache[0].device)
        codes = [x.view(torch.uint8).flatten(2)[:, :, at] for x, at in zip(cache, places)]
        cache = *codes, *cache[2:]
    return tuple(x.reshape(*shape, -1).view(torch.uint8) for x in cache)


def compare_pages(model, seen, sequences):
    """Pages that decode wrote, against what the packed pass writes for them: (compared, differing). A page
    counts once for each tensor of each layer."""
    compared = differing = 0
    for index, mine in seen.items():
        prompt, completion = sequences[index]
        tokens = torch.tensor((prompt + completion)[:-1], device=mine[0][0].device)    # the last: never fed
        count = pages_for(len(tokens))
        theirs, slots = model.new_caches(count), torch.arange(len(tokens), device=tokens.device)
        model.prefill(tokens, [len(tokens)], theirs, slots)
        used = torch.arange(count * PAGE, device=tokens.device).view(count, 1, PAGE) < len(tokens)
        for a, b in zip(sum(map(by_key, mine), ()), sum(map(by_key, theirs), ())):
            differs = (a[:count] != b).any(3) & used
            compared, differing = compared + count, differing + int(differs.flatten(1).any(1).sum())
    return compared, differing


def exact_request(rng, config, completions, longest, longest_prompt):
    """Prompts and response limits: lengths around page and tile edges, the rest spread out; shuffled."""
    lengths = [min(n, longest_prompt) for n in (longest_prompt, 1, 2, 63, 64, 65, 128, 129)]
    lengths = (lengths + [rng.randint(1, longest_prompt) for _ in range(completions)])[:completions // 3]
    rng.shuffle(lengths)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    limits = [round(16 * (longest / 16) ** rng.random()) for _ in range(completions)]  # even in the log
    return prompts, [longest] + limits[1:]


def exact_case(table, name, model, batch):
    """Samples one batch, scores it with the trainer's packed pass in other company, and counts."""
    (slots, completions, longest, longest_prompt), rng, began = batch, random.Random(batch[0]), time.time()
    prompts, limits = exact_request(rng, model.config, completions, longest, longest_prompt)
    temperature = 0.8
    # Few pages, 14 a slot: admission waits for them, and now and then a sequence is preempted.
    sampler = WatchedSampler(model, max_slots=slots, pages=14 * slots + 80)
    sampler.seen = {}
    stop = [0, 1] if slots == 7 else []
    out = sampler.generate(prompts, 3, limits, temperature, seed=slots, stop=stop)
    sequences = [(prompts[i // 3], tokens) for i, tokens in enumerate(out.tokens)]
    sampler.release()

    inv_temp = torch.full((1,), 1 / temperature, device=DEVICE)
    order = rng.sample(range(completions), completions)
    with torch.no_grad():
        theirs = [score(model, micro, inv_temp).cpu()
                  for micro in train.micro_batches([sequences[i] for i in order], 16384)]
    gap = grpo.mismatch(torch.cat([out.logprobs[i] for i in order]), torch.cat(theirs))
    fp8_flow = model.precision == "fp8"          # only there prefill and decode are promised to agree
    pages, bad_pages = compare_pages(model, sampler.seen, sequences) if fp8_flow else (None, None)
    table.add(f"{slots} slots", name, precision=model.precision, kv=model.kv, tokens=out.n_tokens,
              differing=int(gap["differing_tokens"]), share=float(gap["differing"]),
              mean_dlogp=float(gap["mean_dlogp"]), max_dlogp=float(gap["max_dlogp"]),
              pages=pages, pages_differing=bad_pages, longest=max(map(len, out.tokens)),
              preemptions=out.preemptions, seconds=time.time() - began)


def exact(rows, quick):
    """All models in fp8 at all batch sizes, the last also at length and with FP8 KV; then one in the other
    precisions, for contrast."""
    table = Table("exact", rows, "precision", "kv", "tokens", "differing", "pages", "pages_differing",
                  "mean_dlogp", "max_dlogp", "longest", "preemptions", "seconds", key="model")
    batches, models = (EXACT_QUICK, list(EXACT_MODELS)[:2]) if quick else (EXACT_BATCHES, list(EXACT_MODELS))
    runs = [(name, "fp8", "bf16", batches) for name in models[:-1]]
    runs += [(models[-1], "fp8", kv, batches + [EXACT_LONG] * (not quick)) for kv in ("bf16", "fp8")]
    runs += [(models[0], precision, "bf16", batches[-2:-1]) for precision in ("fp8-rollout", "bf16")]
    for seed, (name, precision, kv, cases) in enumerate(runs):
        model = exact_model(name, precision, kv, seed if precision == "fp8" else 0)
        for batch in cases:
            exact_case(table, name, model, batch)
    ours = [r for r in rows if r["section"] == "exact" and r["precision"] == "fp8"]
    total = lambda key: sum(r[key] for r in ours)
    print(f"fp8: {total('differing'):,} of {total('tokens'):,} tokens and {total('pages_differing'):,} of "
          f"{total('pages'):,} page tensors differ")


# ---- gemm: the three products, and decode ------------------------------------------------------------------


def cublaslt(a, scale_a, b, scale_b, blocks):
    """{library: call} for a b^T by cuBLASLt, where torch has it.

    a (M, K) has 1x128 scales, given as (K/128, M); b (N, K) has the same, or 128x128 `blocks` as
    (N/128, K/128), which cuBLASLt reads in lines of a multiple of 4. For a few rows it is behind BF16.
    """
    if not hasattr(F, "scaled_mm") or len(a) <= 256:
        return {}
    row = F.ScalingType.BlockWise1x128
    kind = F.ScalingType.BlockWise128x128 if blocks else row
    scales = F.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous() if blocks else scale_b
    return {"cublaslt": lambda: F.scaled_mm(a, b.t(), scale_a.t(), row, scales.t(), kind)}


def deepgemm(a, scale_a, b, scale_b, blocks):
    """The same by DeepGEMM, which without `blocks` adds to FP32, as WGrad wants it."""
    if not optional("deep_gemm"):
        return {}
    product, left, right = optional("deep_gemm").fp8_gemm_nt, (a, scale_a.t()), (b, scale_b)
    out, options = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=DEVICE), {}
    if not blocks:
        out, right = torch.zeros(len(a), len(b), device=DEVICE), (b, scale_b.t())
        options = {"c": out, "recipe": (1, 1, 128)}
    return {"deepgemm": lambda: (product(left, right, out, **options), out)[1]}


def row_calls(x, w, codes, scales):
    """x w^T -> {who: call}; w (N, K) is given in BF16 and as codes."""
    q, s = fp8.quantize_rows(x)
    return {"ours": lambda: fp8.fprop(q, s, codes, scales),
            "plain": lambda: fp8.fprop(q, s, codes, scales, tile=fp8.plain_tile(len(x))),
            "bf16": lambda: torch.mm(x, w.t()), **cublaslt(q, s, codes, scales, blocks=True),
            **deepgemm(q, s, codes, scales, blocks=True)}


def fprop_calls(M, N, K):
    w = randn(N, K)
    return row_calls(randn(M, K), w, *fp8.quantize_blocks(w))


def dgrad_calls(M, N, K):
    w = randn(N, K)
    codes, scales = fp8.quantize_blocks(w)
    return row_calls(randn(M, N), w.t(), fp8.transpose_codes(codes), scales.t())


def wgrad_calls(M, N, K):
    """Ours and DeepGEMM add to an FP32 gradient (8 bytes an element move), the others write BF16 (2 bytes).
    `_rows` are the libraries' products with the usual scales of WGrad, one for every feature and 128 tokens
    of X; cuBLASLt is also asked for what ours computes."""
    dy, x, out = randn(M, N), randn(M, K), torch.zeros(N, K, device=DEVICE)
    (dc, ds), (xc, xs) = fp8.quantize_cols(dy), fp8.quantize_blocks_t(x, fp8.quantize_rows(x)[1])
    cols, plain = fp8.quantize_cols(x), torch.zeros_like(out)
    rows = cublaslt(dc, ds, *cols, blocks=False) | deepgemm(dc, ds, *cols, blocks=False)
    return {"ours": lambda: (fp8.wgrad(dc, ds, xc, xs, out), out)[1],
            "plain": lambda: (fp8.wgrad(dc, ds, xc, xs, plain, tile=fp8.SQUARE), plain)[1],
            "bf16": lambda: torch.mm(dy.t(), x), **cublaslt(dc, ds, xc, xs, blocks=True),
            **{f"{library}_rows": call for library, call in rows.items()}}


PRODUCTS = {"fprop": fprop_calls, "dgrad": dgrad_calls, "wgrad": wgrad_calls, "decode": fprop_calls}
# Relative difference from ours that is allowed. The plain kernel has the same bits. E4M3 keeps 3 bits after
# the leading one: about 2.6 % on an operand, 3.7 % on a product of random values.
OTHERS = {"plain": 0, "bf16": 0.05, "cublaslt": 0.005, "deepgemm": 0.005,
          "cublaslt_rows": 0.05, "deepgemm_rows": 0.05}


def gemm_row(table, case, where, M, N, K):
    """Time one product at one shape, and each alternative after its result is found to be right."""
    flops = 2 * M * N * K
    # All three matrices once at a byte an element, and what the result has more: FP32 in and out, or BF16.
    bytes_moved = M * (N + K) + N * K + {"wgrad": 7 * N * K, "dgrad": M * K}.get(case, M * N)
    sets = [PRODUCTS[case](M, N, K) for _ in range(max(2, math.ceil(COLD / bytes_moved)))]
    contenders = {name: [calls[name] for calls in sets] for name in sets[0]}
    times = compare(checked(f"{case} {where}", contenders, OTHERS))
    table.add_times(case, where, times, limit_us(bytes_moved, flops, FP8_PEAK), flops, bytes_moved)


def gemm(rows, quick):
    table = Table("gemm", rows, "us", "tflops", "tb_per_s", "of_limit",
                  *(f"x_{name}" for name in OTHERS), "spread")
    shapes = []
    for size in ["8B"] if quick else QWEN3:
        for layer, (N, K) in layer_shapes(size).items():
            shapes += [(case, f"{size} {layer}", 8192, N, K) for case in ("fprop", "dgrad", "wgrad")]
            if (size, layer) == ("8B", "qkv"):
                shapes.append(("wgrad", f"{size} {layer}", 32768, N, K))
            shapes += [("decode", f"{size} {layer}", M, N, K) for M in (16, 64, 256)]

    def compile_one(case, M, N, K):
        calls = PRODUCTS[case](M, N, K)
        calls["ours"](), calls["plain"]()
    compile_ahead([functools.partial(compile_one, case, *shape) for case, _, *shape in shapes])
    for case, layer, M, N, K in shapes:
        gemm_row(table, case, f"{layer} M{M} N{N} K{K}", M, N, K)
    table.means()


# ---- quant: kernels that only move bytes -------------------------------------------------------------------


def quant_cases(M, C, width):
    """{case: (shape, bytes moved an element, maker of a call on fresh memory)}; a scale is 4 bytes for 128
    values."""
    w, scale = fp8.Weight((C,), device=DEVICE), 4 / 128
    w.write(torch.rand(C) + 0.5)
    rstd = torch.rand(M, device=DEVICE) + 0.5
    row_scales = fp8.empty_scales(width // 128, M, DEVICE).fill_(1 / 448)  # read as far as needed
    on = lambda f, *shapes: lambda: functools.partial(f, *(randn(*s) for s in shapes))

    def transpose():
        codes = fp8.quantize_blocks(randn(2 * width, C))[0]
        return lambda: fp8.transpose_codes(codes)
    x, mlp, matrix = (M, C), (M, width), (2 * width, C)
    return {
        "quantize_rows": (x, 3 + scale, on(fp8.quantize_rows, x)),
        "quantize_blocks_t": (x, 3 + scale, on(lambda x: fp8.quantize_blocks_t(x, row_scales), x)),
        "quantize_rows_cols": (x, 4 + 2 * scale, on(fp8.quantize_rows_cols, x)),
        "quantize_blocks": (matrix, 3, on(fp8.quantize_blocks, matrix)),
        "transpose_codes": (matrix, 2, transpose),
        # read the residual and what is added to it, write their sum and the codes
        "add+norm+quantize": (x, 7 + scale, on(lambda h, d: fp8.norm_forward(h, d, w, 1e-6, True), x, x)),
        "norm backward": (x, 8, on(lambda dy, dh, h: fp8.norm_backward(dy, dh, h, rstd, w), x, x, x)),
        "norm to blocks": (x, 3 + scale, on(lambda h: fp8.norm_operand(h, rstd, w, 1e-6, row_scales), x)),
        "swiglu+quantize": (mlp, 5 + scale, on(lambda g: fp8.swiglu_forward(g, True), (M, 2 * width))),
        # read dY, gate and up, write their gradients and the product, transposed
        "swiglu backward": (mlp, 11 + scale,
                            on(lambda dy, g: fp8.swiglu_backward(dy, g, row_scales), mlp, (M, 2 * width))),
    }


def quant(rows, quick):
    table = Table("quant", rows, "us", "tb_per_s", "of_limit", "spread")
    cases = [(size, *case) for size in (["8B"] if quick else QWEN3)
             for case in quant_cases(8192, QWEN3[size][0], QWEN3[size][2]).items()]
    compile_ahead([lambda make=make: make()() for _, _, (_, _, make) in cases])
    for size, case, (shape, per_element, make) in cases:
        bytes_moved = math.prod(shape) * per_element
        calls = [make() for _ in range(max(1, min(8, math.ceil(2 * COLD / bytes_moved))))]
        table.add_times(case, f"{size} {shape[0]} x {shape[1]}", compare({"ours": calls}),
                        limit_us(bytes_moved), bytes_moved=bytes_moved)


# ---- block: one layer of Qwen3, forward and backward, quantization included --------------------------------


def our_block(model, packing):
    """The model's first layer: (h, delta) -> (h, delta), (T, C) each, as Layer.forward describes them."""
    layer, attend = model.layers[0], lambda q, k, v, cache: attention(q, k, v, packing).flatten(1)
    return lambda h, delta: layer(h, delta, packing.positions, model.table, attend,
                                  quantized=model.precision == "fp8", fp8_kv=False)


def torch_block(model, S, backend):
    """The same without kernels of one's own, on sequences of S tokens -> function, its weights as leaves."""
    c, eps = model.config, model.config.rms_norm_eps
    H, G, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    w = {name: x.data.clone().requires_grad_() for name, x in model.layers[0].named_children()}
    cos, sin = (x.repeat(1, 2)[:, None].to(model.dtype) for x in model.table[:S].chunk(2, 1))   # (S, 1, D)
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w[name], eps)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def run(h, delta):
        h = h + delta
        qkv = F.linear(norm(h, "input_norm"), w["qkv"]).view(-1, S, H + 2 * G, D)
        q, k, v = qkv.split((H, G, G), 2)
        o = sdpa(rotate(norm(q, "q_norm")), rotate(norm(k, "k_norm")), v, backend)       # (B, S, H, D)
        h = h + F.linear(o.reshape(len(h), -1), w["o"])
        gate, up = F.linear(norm(h, "post_norm"), w["gate_up"]).chunk(2, 1)
        return h, F.linear(F.silu(gate) * up, w["down"])
    return run, tuple(w.values())


block_model = functools.partial(random_model, num_hidden_layers=1, vocab_size=128)


def block_row(table, size, S, T):
    C, H, _, _ = QWEN3[size]
    h, delta = randn(T, C, grad=True), randn(T, C, grad=True)
    grads, packing = (randn(T, C), randn(T, C)), pack([S] * (T // S), DEVICE)
    in_bf16 = block_model(size, "bf16")
    blocks = {"ours": (our_block(block_model(size, "fp8"), packing), ()),
              "bf16": (our_block(in_bf16, packing), ()),
              "flash": torch_block(in_bf16, S, SDPBackend.FLASH_ATTENTION),
              "cudnn": torch_block(in_bf16, S, SDPBackend.CUDNN_ATTENTION)}
    both = lambda run, leaves: torch.autograd.grad(run(h, delta), (h, delta, *leaves), grads)

    with torch.no_grad():                              # the residual stream, and what the MLP adds to it
        calls = {name: [functools.partial(run, h, delta)] for name, (run, _) in blocks.items()}
        calls = checked(f"block {size}", calls, 0.1)
        forward = compare(calls, graph=False, budget_s=0.2)
    step = compare({name: [functools.partial(both, *blocks[name])] for name in calls}, False, budget_s=0.2)
    products = 2 * T * sum(N * K for N, K in layer_shapes(size).values())
    scores = 2 * T * S * H * 128                       # as in attention_rows
    # p, a: what products and attention cost, over what they cost in the forward pass alone
    for case, times, p, a in ("forward", forward, 1, 1), ("forward+backward", step, 3, 3.5):
        in_torch = [times[name] for name in ("flash", "cudnn") if name in times]
        if in_torch:
            times["torch"] = min(in_torch)
        limit = limit_us(flops=p * products, peak=FP8_PEAK) + limit_us(flops=a * scores)
        table.add_times(case, f"{size}, {T // S} x {S} tokens", times, limit, p * products + a * scores)


def block(rows, quick):
    table = Table("block", rows, "us", "tflops", "of_limit", "x_bf16", "x_torch", "spread")
    sizes, S, T = (["8B"] if quick else list(QWEN3)), 1024, 8192

    def compile_one(size, precision):
        run = our_block(block_model(size, precision), pack([S] * (T // S), DEVICE))
        h, delta = randn(T, QWEN3[size][0], grad=True), randn(T, QWEN3[size][0], grad=True)
        with torch.autograd.set_multithreading_enabled(False):       # the backward pass in this very thread
            torch.autograd.grad(run(h, delta), (h, delta), (randn(*h.shape), randn(*h.shape)))
    compile_ahead([functools.partial(compile_one, size, p) for size in sizes for p in ("fp8", "bf16")])
    for size in sizes:
        block_row(table, size, S, T)
    table.means()


# ---- optimizer: AdamW that writes the codes, against torch's and a quantizer after it ----------------------


def our_adamw(size):
    """AdamW over the matrices of one layer, kept as codes, with random gradients."""
    shapes = layer_shapes(size)
    weights = {name: fp8.Weight(shape, device=DEVICE, keep="codes") for name, shape in shapes.items()}
    ours = fp8.AdamW(weights, (0.9, 0.95), 1e-8, 0.1, lambda name: True)
    ours.load((name, torch.randn(shape, device=DEVICE) * 0.02) for name, shape in shapes.items())
    ours.grads.normal_()
    return ours


def optimizer_row(table, size):
    """A step on the matrices of one layer: gradient norm, clipping, update, codes, gradients cleared."""
    ours = our_adamw(size)
    parameters = [torch.nn.Parameter(master.clone()) for master in ours.master.values()]
    theirs = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    codes = [fp8.quantize_blocks(p.detach()) for p in parameters]
    for w, p in zip(ours.weights.values(), parameters):
        p.grad = w.grad.clone()

    def together():
        ours.step(1e-4, 1.0)
        return list(ours.master.values())

    def separate():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        theirs.step()
        for p, out in zip(parameters, codes):
            fp8.quantize_blocks(p.detach(), out=out)
        theirs.zero_grad(set_to_none=False)
        return [p.detach() for p in parameters]
    # Gradient: read for its norm and for the update, then cleared. Master, moments: read, written. Codes.
    bytes_moved = 37 * sum(p.numel() for p in parameters)
    contenders = checked(f"AdamW {size}", {"ours": [together], "torch": [separate]}, 1e-6)
    table.add_times("adamw", f"{size}, one layer", compare(contenders, graph=False), limit_us(bytes_moved),
                    bytes_moved=bytes_moved)


def optimizer(rows, quick):
    table = Table("optimizer", rows, "us", "tb_per_s", "of_limit", "x_torch", "spread")
    sizes = ["8B"] if quick else list(QWEN3)
    compile_ahead([lambda size=size: our_adamw(size).step(1e-4, 1.0) for size in sizes])
    for size in sizes:
        optimizer_row(table, size)
    table.means()


# ---- attention ---------------------------------------------------------------------------------------------


def sdpa(q, k, v, backend):
    """(B, S, H, D) and (B, S, G, D) twice -> (B, S, H, D), causal, by the given kernel of torch."""
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attention_rows(table, S, T, H, G, D):
    """Forward and backward over T tokens in sequences of S."""
    q, k, v = (randn(T, n, D, grad=True) for n in (H, G, G))
    batched = [x.detach().view(T // S, S, -1, D).requires_grad_() for x in (q, k, v)]
    packing, do = pack([S] * (T // S), q.device), randn(T, H, D)
    where = f"{T // S} x {S}, heads {H}/{G} x {D}"
    run = {"ours": lambda: attention(q, k, v, packing),
           "sdpa": lambda: sdpa(*batched, SDPBackend.FLASH_ATTENTION),
           "cudnn": lambda: sdpa(*batched, SDPBackend.CUDNN_ATTENTION)}
    flops = 2 * T * S * H * D                # two products of T x S/2 scores: the causal half
    with torch.no_grad():
        forward = checked(f"attention {where}", {name: [call] for name, call in run.items()}, 0.02)
        table.add_times("forward", where, compare(forward), limit_us(flops=flops), flops)
    outputs = {name: run[name]() for name in forward}

    def gradient(name):
        o, inputs = outputs[name], (q, k, v) if name == "ours" else batched
        return torch.autograd.grad(o, inputs, do.view(o.shape), retain_graph=True)

    def ordered():
        """torch's flash attention without atomics, as ours, and without its filling of empty tensors."""
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            return gradient("sdpa")
        finally:
            torch.use_deterministic_algorithms(False)
    backward = {name: [functools.partial(gradient, name)] for name in forward}
    if "sdpa" in forward:
        backward["sdpa_deterministic"] = [ordered]
    backward = checked(f"attention backward {where}", backward, 0.02)
    table.add_times("backward", where, compare(backward, graph=False), limit_us(flops=2.5 * flops),
                    2.5 * flops)


def fill(caches):
    for pages in itertools.chain(*caches):
        pages.copy_(randn(*pages.shape))


def paged_row(table, B, length, H, G, D, fp8_kv=False):
    """One decode step of B sequences over shuffled pages, against the bytes of their keys and values."""
    each = pages_for(length)
    cache = empty_cache(B * each + 1, G, D, fp8_kv, torch.bfloat16, DEVICE)
    fill([cache])
    pages = torch.randperm(B * each, device=DEVICE).int().view(B, each) + 1          # page 0 is nobody's
    lengths, q = torch.full((B,), length, dtype=torch.int32, device=DEVICE), randn(B, H, D)
    bytes_moved = sum(x[1:].nbytes for x in cache) + 4 * B * H * D
    times = compare({"ours": [lambda: paged_attention(q, cache, pages, lengths)]})
    table.add_times("decode", f"{B} x {length}, heads {H}/{G} x {D}", times, limit_us(bytes_moved),
                    bytes_moved=bytes_moved, kv="fp8" if fp8_kv else "bf16")


def attention_section(rows, quick):
    table = Table("attention", rows, "kv", "us", "tflops", "tb_per_s", "of_limit", "x_sdpa",
                  "x_sdpa_deterministic", "x_cudnn", "spread")
    for S in [4096] if quick else [1024, 4096, 16384]:
        attention_rows(table, S, 16384, 32, 8, 128)
    decodes = [(64, 1024), (256, 1024), (64, 4096), (16, 16384), (1, 16384)]
    for B, length in decodes[:1] if quick else decodes:
        for fp8_kv in (False, True):
            paged_row(table, B, length, 32, 8, 128, fp8_kv)


# ---- head: log-probs over the vocabulary -------------------------------------------------------------------


def chunked_cross_entropy(hidden, w, targets, backward):
    """The usual way without a kernel of one's own: 1024 tokens at a time, logits in BF16, softmax in FP32."""
    losses = []
    for i in range(0, len(hidden), 1024):
        with torch.set_grad_enabled(backward):
            logits = (hidden[i:i + 1024] @ w.t()).float()
            losses.append(F.cross_entropy(logits, targets[i:i + 1024], reduction="none"))
        if backward:
            losses[-1].sum().backward()  # at once: the logits of a chunk are gone before the next one comes
    return -torch.cat(losses)


def head_rows(table, T, C, V):
    weight = fp8.Weight((V, C), device=DEVICE)
    weight.write(torch.randn(V, C, device=DEVICE) * C ** -0.5)
    hidden, targets = randn(T, C, grad=True), torch.randint(V, (T,), device=DEVICE)
    w, where = weight.data.detach().requires_grad_(), f"{T} tokens, C{C} V{V}"
    inv_temp, grad = torch.ones(1, device=DEVICE), torch.ones(T, device=DEVICE)
    ours = lambda: token_logprobs(hidden, weight, targets, inv_temp)
    flops = 2 * T * C * V
    theirs = lambda backward: [lambda: chunked_cross_entropy(hidden, w, targets, backward)]
    with torch.no_grad():
        forward = compare(checked(f"log-probs {where}", {"ours": [ours], "torch": theirs(False)}, 0.01))
    # Ours forms the logits twice, theirs once: the operations counted are the three products that are needed.
    both = [lambda: torch.autograd.grad(ours(), hidden, grad)]
    step = compare({"ours": both, "torch": theirs(True)}, graph=False)
    table.add_times("forward", where, forward, limit_us(flops=flops), flops)
    table.add_times("forward+backward", where, step, limit_us(flops=3 * flops), 3 * flops)
    noise, seed = torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for B in (64, 256):
        x, keys = hidden[:B].detach(), torch.arange(B, device=DEVICE)
        positions = keys.int()
        times = compare({"ours": [lambda: sample(x, weight, inv_temp, noise, seed, keys, positions)]})
        table.add_times("sample", f"{B} tokens, C{C} V{V}", times, limit_us(2 * V * C, 2 * B * C * V),
                        bytes_moved=2 * V * C)


def head(rows, quick):
    table = Table("head", rows, "us", "tflops", "tb_per_s", "of_limit", "x_torch", "spread")
    for C in [2048] if quick else [1024, 2048, 4096]:
        head_rows(table, 8192, C, VOCAB)


# ---- decode: one step of the sampler -----------------------------------------------------------------------

FLOWS = [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8")]     # precision of linears, of KV


def step_bytes(sampler, B, context):
    """What a decode step has to read: all weights but the embedding (unless it is the head) once, and KV."""
    model = sampler.model
    read = [w for w in model.weights().values() if w is model.head or w is not model.embedding]
    return (sum(buffer.nbytes for w in read for buffer in w.buffers())
            + B * context * sampler._page_bytes() // PAGE)


@contextlib.contextmanager
def only_80_gb():
    """Takes the rest of this GPU's memory away."""
    free_earlier()
    rest = max(0, torch.cuda.mem_get_info()[0] - 80 * 10**9)
    taken = torch.empty(rest, dtype=torch.uint8, device=DEVICE)
    yield
    del taken


def at_context(sampler, B, context):
    """Sets the sampler's rows as if B sequences had come so far; their pages lie scattered in the pool."""
    each, row = pages_for(context + 64), torch.arange(B, device=DEVICE)
    sampler.table[:B, :each] = torch.randperm(B * each, device=DEVICE).int().view(B, each) + 1
    at = context - 1                                                     # position of the current token
    sampler.ids[:3, :B] = torch.stack([row, row, sampler.table[:B, at // PAGE].long() * PAGE + at % PAGE])
    sampler.spans[:, :B] = torch.tensor([[at], [context], [1 << 30]], device=DEVICE)
    sampler.ids[3] = 0


def kernels_of(run):
    """-> (number of kernels, us in which at least one of them runs) of one call, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events()
                   if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, until = 0.0, 0.0
    for start, end in spans:                            # a kernel may start before the one ahead of it ends
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return len(spans), busy


def decode_cell(sampler, B, context):
    """Time of a step, in microseconds. A step moves the rows on by one token: 64 of them at most."""
    graph = sampler._graph(B)
    at_context(sampler, B, context)
    return 1e6 * timed([graph.replay, sampler.ids[3].zero_], 5)[0]


def decode(rows, quick):
    """Steps of the captured graph; `gap` is the share of the time in which no kernel runs."""
    table = Table("decode", rows, "precision", "kv", "us", "tok_per_s", "tb_per_s", "of_limit", "x_bf16",
                  "kernels", "gap", key="model")
    batches, contexts = ((64,), (1024,)) if quick else ((1, 16, 64, 256), (256, 1024, 4096, 16384))
    for size, (precision, kv) in itertools.product(["1.7B"] if quick else WHOLE, FLOWS):
        sampler, width = Sampler(random_model(size, precision, kv)), pages_for(16384 + 64)
        most = min(sampler._pages_in_memory(max(batches), width), 256 * width + 1)
        sampler._build(max(batches), width, most)
        fill(sampler.pool.caches)
        for B, context in itertools.product(batches, contexts):
            if B * pages_for(context + 64) >= most:
                continue
            with torch.no_grad():
                us = decode_cell(sampler, B, context)
                kernels, busy = kernels_of(sampler._graph(B).replay) if context == 1024 else (None, None)
            moved = step_bytes(sampler, B, context)
            table.add(f"{B} x {context}", size, precision=precision, kv=kv, us=us, tok_per_s=B / us * 1e6,
                      tb_per_s=moved / us / 1e6, of_limit=limit_us(moved) / us, kernels=kernels,
                      gap=busy and 1 - busy / us)
        del sampler


# ---- rollout: whole batches of completions -----------------------------------------------------------------


def rollout_request(prompts, n, longest):
    """-> prompts of 100 to 300 tokens, n, long-tailed lengths: half of them below a tenth of the longest."""
    rng = random.Random(0)
    ids = [[rng.randrange(VOCAB) for _ in range(rng.randint(100, 300))] for _ in range(prompts)]
    limits = [min(longest, 1 + int(longest / 10 * math.exp(rng.gauss(0, 1)))) for _ in range(prompts * n)]
    return ids, n, limits


def rollout_row(table, model, size, prompts, n, limits, case, slots=256, theirs=None):
    """generate() with its graphs captured and its memory taken before: a training run does so once."""
    sampler, everything = Sampler(model, max_slots=slots), range(model.config.vocab_size)
    limits = [limits] * (len(prompts) * n) if isinstance(limits, int) else limits
    for few in (len(prompts), 1, 2, 4, 8, 16, 32):            # prefills of every size; each stops at once
        sampler.generate(prompts[:few], n, limits[:few * n], stop=everything)
    for B in BUCKETS:
        if B <= sampler.slots:
            sampler._graph(B)
    sampler.generate(prompts, n, [min(8, limit) for limit in limits], stop=[])     # some steps: memory too
    out = sampler.generate(prompts, n, limits, stop=[])
    table.add(case, size, precision=model.precision, kv=model.kv, tok_per_s=out.tok_per_s,
              x_transformers=theirs and out.tok_per_s / theirs, occupancy=out.occupancy, seconds=out.seconds,
              tokens=out.n_tokens, steps=out.steps, preemptions=out.preemptions)
    sampler.release()


def transformers_model():
    """The library's model at the 1.7B shape, in BF16."""
    library = optional("transformers")
    config = library.Qwen3Config(**config_fields("1.7B"), eos_token_id=None, pad_token_id=0)
    with torch.device(DEVICE):
        return library.Qwen3ForCausalLM(config).bfloat16()


def transformers_rate(prompts, new):
    """Tokens/s of transformers' generate."""
    theirs, ids = transformers_model(), torch.tensor(prompts, device=DEVICE)
    run = lambda count: theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
                                        min_new_tokens=count, do_sample=True, top_k=0)
    run(4)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run(new)
    torch.cuda.synchronize()
    return len(prompts) * new / (time.perf_counter() - begin)


def rollout_section(rows, quick):
    """The sampling of a GRPO step, prefill and host included: a batch that transformers can serve, batches of
    one length, lengths with a long tail; last, up to 16k tokens on 80 GB."""
    table = Table("rollout", rows, "precision", "kv", "tok_per_s", "x_bf16", "x_transformers", "occupancy",
                  "seconds", key="model")
    longest, square = 256 if quick else 4096, [[i] * 128 for i in range(256)]
    for size in ["1.7B"] if quick else WHOLE:
        theirs = transformers_rate(square, 128) if size == "1.7B" and optional("transformers") else None
        for precision, kv in FLOWS:
            row = functools.partial(rollout_row, table, random_model(size, precision, kv), size)
            if size == "1.7B":
                row(square, 1, 128, "256 x (128 + 128)", theirs=theirs)
            if size == "8B":
                for B in 64, 256:
                    row(square[:B], 1, 512, f"{B} x (128 + 512)")
            row(*rollout_request(64, 8, longest), f"64 x 8 up to {longest}")
            del row
    if not quick:
        with only_80_gb():
            rollout_row(table, random_model("1.7B", "fp8"), "1.7B", *rollout_request(64, 8, 16384),
                        "64 x 8 up to 16384, 80 GB", slots=None)


# ---- train: forward, backward, optimizer; step: rollout and update -----------------------------------------

BATCH = 4                                 # micro-batches of a batch: 1 update of all, or 4 of one each


def trained_model(size, precision, kv="bf16", **flags):
    """-> flags, model and optimizer. On one H200 8B runs its layers again in the backward pass, and has
    masters and moments in BF16."""
    large = size == "8B"
    cfg = dataclasses.replace(train.Config(precision=precision, micro_tokens=16384, recompute=large,
                                           states="bf16" if large else "fp32"), **flags)
    model = random_model(size, precision, kv)
    torch.cuda.reset_peak_memory_stats()
    model.recompute = cfg.recompute
    return cfg, model, fp8.AdamW(model.weights(), (0.9, 0.95), 1e-8, 0.0, decay=lambda name: False,
                                 states=train.STATES[cfg.states])


def peak_gib():
    return torch.cuda.max_memory_allocated() / 2**30


def loss_of(model, pairs, inv_temp, total):
    """The trainer's loss of one micro-batch, with advantages that differ."""
    logp = score(model, pairs, inv_temp)
    advantage = torch.linspace(-1, 1, len(logp), device=DEVICE)
    return grpo.policy_loss(logp, logp.detach(), advantage, total)[0]


def update_seconds(model, optimizer, count, length):
    """Seconds of a pass for old log-probs, forward, backward and optimizer on `count` sequences of `length`
    fed tokens each, of which all but the first are learned."""
    pairs = [([0], torch.randint(VOCAB, (length,)).tolist()) for _ in range(count)]
    one, loss = torch.ones(1, device=DEVICE), []

    @torch.no_grad()
    def old():
        score(model, pairs, one)

    parts = [old, lambda: loss.append(loss_of(model, pairs, one, count * length)),
             lambda: loss.pop().backward(), lambda: optimizer.step(1e-6, 1.0)]
    return timed(parts)


def model_flops(config, tokens, length):
    """Operations that a forward and backward pass needs by the book: what is computed twice counts once."""
    c, heads = config, config.num_attention_heads * config.head_dim
    layer = c.hidden_size * (2 * heads + 2 * c.num_key_value_heads * c.head_dim + 3 * c.intermediate_size)
    matrices = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size
    return 6 * tokens * (matrices + c.num_hidden_layers * heads * length)      # causal: half of length^2


def train_rows(table, size, lengths):
    """Both precisions at each length."""
    for precision in ("bf16", "fp8"):
        cfg, model, optimizer = trained_model(size, precision)
        for length in lengths:
            tokens, count = cfg.micro_tokens * BATCH, cfg.micro_tokens // length
            old, forward, backward, step = update_seconds(model, optimizer, count, length)
            for updates in (1, BATCH):
                # Where sampler and trainer are not exact, several updates need a pass for the old log-probs.
                passes = BATCH * old if updates > 1 and precision != "fp8" else 0.0
                seconds = passes + BATCH * (forward + backward) + updates * step
                table.add(f"{length}, {updates} updates", size, precision=precision,
                          tok_per_s=tokens / seconds, old_s=passes, forward_s=BATCH * forward,
                          backward_s=BATCH * backward, step_s=updates * step, gib=peak_gib(),
                          mfu=model_flops(model.config, tokens, length) / seconds / BF16_PEAK)
        del model, optimizer


def transformers_step(recompute):
    """A step of the library as it comes: BF16, SDPA, fused AdamW; 8 sequences of 1024 tokens. -> tokens/s"""
    free_earlier()
    torch.cuda.reset_peak_memory_stats()
    model = transformers_model().train()
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids, loss = torch.randint(VOCAB, (8, 1024), device=DEVICE), []
    return 8192 / sum(timed([
        lambda: loss.append(model(input_ids=ids, labels=ids, use_cache=False).loss),
        lambda: loss.pop().backward(),
        lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step(),
                 optimizer.zero_grad(set_to_none=True))]))


def our_step(precision, recompute):
    """The same by the trainer's parts. -> tokens/s"""
    _, model, optimizer = trained_model("1.7B", precision)
    model.recompute = recompute
    return 8192 / sum(update_seconds(model, optimizer, 8, 1024)[1:])


def train_section(rows, quick):
    columns = "precision", "tok_per_s", "mfu", "old_s", "forward_s", "backward_s", "step_s", "gib", "x_bf16"
    table = Table("train", rows, *columns, "x_transformers", key="model")
    for size in ["1.7B"] if quick else WHOLE:
        train_rows(table, size, [4096] if quick else [1024, 4096, 16384])
    library = optional("transformers")
    for recompute in (False, True) if library else ():             # on both sides or on neither
        case = "8 x 1024" + ", recompute" * recompute
        theirs = transformers_step(recompute)
        table.add(case, "1.7B", precision=f"transformers {library.__version__}", tok_per_s=theirs,
                  gib=peak_gib())
        for precision in ("bf16", "fp8"):
            rate = our_step(precision, recompute)
            table.add(case, "1.7B", precision=precision, tok_per_s=rate, gib=peak_gib(),
                      x_transformers=rate / theirs)


def step_row(table, size, precision, kv, prompts, samples, length, where="", **flags):
    """One GRPO step, rollout and update, as train.py runs it."""
    free_earlier()
    held = torch.cuda.memory_allocated() / 2**30
    cfg, model, optimizer = trained_model(size, precision, kv, **flags)
    sampler, one = Sampler(model), torch.ones(1, device=DEVICE)
    needs = train.transient(train.memory(model.config, cfg, cfg.micro_tokens))
    questions = [torch.randint(VOCAB, (128,)).tolist() for _ in range(prompts)]
    tokens = prompts * samples * length

    def update(completions, ends=False):
        pairs = [(questions[i // samples], tokens) for i, tokens in enumerate(completions)]
        micro_batches = list(train.micro_batches(pairs, cfg.micro_tokens))
        for micro in (micro_batches[0], micro_batches[-1]) if ends else micro_batches:
            loss_of(model, micro, one, tokens).backward()
        optimizer.step(1e-6, 1.0)
        torch.cuda.synchronize()

    # First one token each, and two micro-batches, of which the last is a short one with kernels of its own:
    # this compiles, captures and takes its memory.
    sampler.generate(questions, samples, length, stop=range(VOCAB))
    train.hand_over(sampler, needs)
    update([[0] * length] * (prompts * samples), ends=True)
    t0 = time.perf_counter()
    out = sampler.generate(questions, samples, length, stop=[])
    train.hand_over(sampler, needs)
    t1 = time.perf_counter()
    update(out.tokens)
    t2 = time.perf_counter()
    table.add(f"{prompts * samples} x {length}{where}", size, precision=precision, kv=kv,
              tok_per_s=tokens / (t2 - t0), rollout_s=t1 - t0, update_s=t2 - t1, gib=peak_gib() - held)


def step_section(rows, quick):
    """Responses of 4k and 16k tokens in three precisions, and with FP8 pages; then what fits into 80 GB."""
    table = Table("step", rows, "precision", "kv", "tok_per_s", "rollout_s", "update_s", "gib", "x_bf16",
                  key="model")
    flows = ("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("fp8-rollout", "bf16")
    batches = [(8, 8, 128)] if quick else [(8, 8, 4096), (2, 4, 16384)]
    for size, flow, batch in itertools.product(["1.7B"] if quick else WHOLE, flows, batches):
        step_row(table, size, *flow, *batch)
    if not quick:
        with only_80_gb():
            step_row(table, "4B", "fp8", "bf16", 4, 4, 4096, ", 80 GB", recompute=True, micro_tokens=8192)


# ---- mismatch and rules: what lifting one rule of the numerics contract at a time does, and costs ----------

MISMATCH, MISMATCH_QUICK = (64, 2048), (4, 24)        # responses, tokens of each


def relaunched(module, name, **changes):
    """The change that makes a kernel run with some options of its own, whatever `launch` says."""
    kernel = getattr(module, name)

    class Relaunched:
        def __getitem__(self, grid):
            return lambda *args, **options: kernel[grid](*args, **options | changes)
    return module, name, Relaunched()


def mismatch_cases(model):
    """{case: (precision, changes while the sampler runs, changes while the trainer scores)}, a change being
    an object, its attribute and another value. A rule is lifted on one side: on both, bits may agree again.
    """
    fused = tuple(relaunched(module, name, enable_fp_fusion=True) for module in (fp8, model_file)
                  for name in vars(module) if name.endswith("_kernel"))
    return {
        "exact": ("fp8", (), ()),
        "both in BF16": ("bf16", (), ()),
        "FP8 and BF16": ("fp8-rollout", (), ()),
        "KV in FP8": ("fp8", ((model, "kv", "fp8"),), ()),
        "tile of 16 rows": ("fp8", ((fp8, "fprop_tile", lambda *shape: (16, 64, False, 4, 4)),), ()),
        "softmax, 4 warps": ("fp8", (relaunched(model_file, "paged_attention_kernel", num_warps=4),), ()),
        "norm, 8 warps": ("fp8", (relaunched(fp8, "norm_kernel", num_warps=8),), ()),
        "contraction on": ("fp8", fused, ()),
        "softmax unsplit": ("fp8", ((model_file, "SPLIT", 1 << 30),), ()),
        "KV tile of 128": ("fp8", (), ((model_file, "PAGE", 128),)),
        "head tile of 128": ("fp8", (), ((model_file, "VTILE", 128),)),
    }


def changed(*changes):
    """A context in which the attributes have their other values. A graph captured in it keeps them."""
    stack = contextlib.ExitStack()
    for change in changes:
        stack.enter_context(mock.patch.object(*change))
    return stack


def sampled(run, count, longest):
    """-> `count` pairs of prompt and response, this of `longest` tokens; their log-probs, end to end."""
    prompts = [run.encode_prompt(problem) for problem in run.problems(0, count)]
    sampler = Sampler(run.model)
    out = sampler.generate(prompts, 1, longest, stop=[])
    sampler.release()
    return list(zip(prompts, out.tokens)), torch.cat(out.logprobs)


def mismatch(rows, quick, *folders):
    """One set of weights, BF16 and codes of it, in every case: another precision, or one rule lifted."""
    columns = "precision", "tokens", "differing", "mean_dlogp", "max_dlogp", "k3"
    table, panels = Table("mismatch", rows, *columns, key="model"), []
    count, longest = MISMATCH_QUICK if quick else MISMATCH
    edges = [0, *sorted({round(longest ** (i / 16)) for i in range(17)})]              # even in the log
    for folder in folders or [""]:
        model, rollouts, before = os.path.basename(os.path.normpath(folder or "random")), {}, len(rows)
        with tempfile.TemporaryDirectory() as out:                          # of a run that is not started
            run = train.Run(train.parse([f"--model={folder}", f"--out={out}", "--precision=fp8-rollout"]))
        for case, (precision, sampling, scoring) in mismatch_cases(run.model).items():
            only_kernels = any(name.endswith(("_kernel", "_tile")) for _, name, _ in sampling)
            if only_kernels and run.device.type == "cpu":
                note(f"note: {case}: the references have no such thing")
                continue
            flow = run.model, "precision", precision
            if (precision, sampling) not in rollouts:
                with changed(flow, *sampling):
                    rollouts[precision, sampling] = sampled(run, count, longest)
            sequences, ours = rollouts[precision, sampling]
            with changed(flow, *scoring):
                theirs = run.no_grad_scores(run.model, sequences).cpu()
            gap = {name: value.item() for name, value in grpo.mismatch(ours, theirs).items()}
            gap["differing"], by_position = gap.pop("differing_tokens"), (ours - theirs).abs().view(count, -1)
            bins = [by_position[:, a:b].mean().item() for a, b in itertools.pairwise(edges)]
            table.add(case, model, precision=precision, tokens=len(ours), **gap, edges=edges, bins=bins)
        middles, ranked = [math.sqrt((a + 1) * b) for a, b in itertools.pairwise(edges)], {}
        for row in sorted(rows[before:], key=lambda row: (-row["mean_dlogp"], row["case"] == "exact")):
            ranked[f"{row['case']} ({show(row['mean_dlogp'])})"] = middles, row["bins"]
        print(f"{model}, sources by mean |dlogp|:", *ranked, sep="\n  ")
        title = f"{model}: mean |log p sampler - log p trainer|"
        panels.append((title, "token of the response", "log", "symlog", ranked))
    if not quick:
        save(draw(panels)[0], beside_rows("mismatch.png"))


def rules(rows, quick):
    """Log-probs of a packed batch and decode steps by our rules, and with one lifted: where x_lifted, its
    time over ours, is below 1, the rule costs something."""
    model, one, ours = random_model("1.7B", "fp8", num_hidden_layers=4), torch.ones(1, device=DEVICE), {}
    packing, tokens = pack([4096] * 4, DEVICE), torch.randint(VOCAB, (16384,), device=DEVICE)
    table = Table("rules", rows, "us", "x_lifted", key="model")
    for case, (precision, sampling, scoring) in mismatch_cases(model).items():
        if precision != "fp8":
            continue
        times = {}
        with changed(*sampling, *scoring), torch.no_grad():
            forward = lambda: token_logprobs(model(tokens, packing), model.head, tokens, one)
            times["forward 4 x 4096"] = 1e6 * timed([forward], 5)[0]
            if not scoring:                          # else the rule is one of the trainer's kernels
                sampler, width = Sampler(model), pages_for(16384 + 64)
                sampler._build(64, width, 64 * pages_for(4096 + 64) + 1)
                fill(sampler.pool.caches)
                for B, context in [(64, 1024), (64, 4096), (1, 16384)][:1 if quick else None]:
                    times[f"decode {B} x {context}"] = decode_cell(sampler, B, context)
                del sampler
        for what, us in times.items():
            table.add(f"{case}: {what}", "1.7B, 4 layers", us=us, x_lifted=us / ours.setdefault(what, us))


# ---- moves: what an update changes, and how far the FP8 gradient is from the BF16 one ----------------------


def on_policy_gradient(run, model, batch):
    """FP32 vectors, one a layer, of one batch at ratio 1; what was accumulated is cleared."""
    at = 0
    for micro in train.micro_batches(batch["sequences"], run.cfg.micro_tokens):
        logp = score(model, micro, run.inv_temp)
        advantage = batch["advantages"][at:at + len(logp)]
        grpo.policy_loss(logp, logp.detach(), advantage, batch["tokens"])[0].backward()
        at += len(logp)
    gradients = [torch.cat([w.gradient().flatten() for w in layer.children()]) for layer in model.layers]
    for w in model.weights().values():
        w.gradient().zero_()
    return gradients


MOVED = {"codes_changed": "share of FP8 codes that change", "dlogp": "mean |change of log p|"}


def watch(table, where, update):
    """`update`, measured as well: the gradient against that of a BF16 twin, made from the same masters, on
    the same tokens; the codes before and after; and how far the log-probs of these tokens move."""
    def watched(run, batch, metrics):
        if not batch["advantages"].any():                                # all rewards alike: no gradient
            return update(run, batch, metrics)
        model, master = run.model, run.optimizer.master
        twin = Transformer(model.config, "bf16", run.device, seed=None).load(master.items())
        ours, theirs = (on_policy_gradient(run, m, batch) for m in (model, twin))
        coded = [w for w in model.weights().values() if w.codes is not None]
        before = [w.codes.view(torch.uint8).clone() for w in coded]
        result = update(run, batch, metrics)
        flips = sum((w.codes.view(torch.uint8) != old).sum().item() for w, old in zip(coded, before))
        after = run.no_grad_scores(model, batch["sequences"])
        cosines = [F.cosine_similarity(a, b, 0).item() for a, b in zip(ours, theirs)]
        table.add(f"update {run.step}", where, lr=run.learning_rate(run.step),
                  codes_changed=flips / sum(old.numel() for old in before), least_cosine=min(cosines),
                  dlogp=(after - result[0]).abs().mean().item(), cosines=cosines)
        return result
    return watched


MOVES = "--sft-steps=200 --steps=12 --eval-problems=64 --eval-every=0 --save-every=0 --sample-every=0".split()
LEARN_FORMAT = "--difficulty=2 --sft-steps=40 --sft-lr=5e-5 --max-new-tokens=64".split()


def moves(rows, quick, *folders):
    """A run of train.py, of the default model or of each folder, every update of which is watched."""
    table, shares, angles = Table("moves", rows, "lr", *MOVED, "least_cosine", key="model"), {}, {}
    for folder in folders or [""]:
        model = os.path.basename(os.path.normpath(folder or "default"))
        before, update, flags = len(rows), watch(table, model, train.Run.update), LEARN_FORMAT * bool(folder)
        with tempfile.TemporaryDirectory() as out, mock.patch.object(train.Run, "update", update):
            train.main([f"--model={folder}", f"--out={out}", *MOVES, *flags])
        updates = rows[before:]
        for name, what in MOVED.items():
            shares[f"{model}: {what}"] = range(len(updates)), [r[name] for r in updates]
        layers = [sorted(1 - cosine for cosine in layer) for layer in zip(*(r["cosines"] for r in updates))]
        for which, at in ("median", len(updates) // 2), ("worst", -1):
            angles[f"{model}: {which} update"] = range(len(layers)), [layer[at] for layer in layers]
    if not quick:
        figure, _ = draw([("what an update changes", "update", "linear", "log", shares),
                          ("1 - cosine of the FP8 and the BF16 gradient", "layer", "linear", "log", angles)])
        save(figure, beside_rows("policy_moves.png"))


# ---- plot: curves of training runs -------------------------------------------------------------------------


def read_log(run):
    """The records of a run's log.jsonl; `run` is its folder or the file itself."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {path}: give the --out folder of a train.py run")
    with open(path, encoding="utf-8") as f:
        lines = f.read().split("\n")[:-1]        # what follows the last end of a line is half a record
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}:{number} is not JSON: {line[:60]!r}")
    return records


def over_seeds(logs, kind, key):
    """The seeds of one run -> step, mean, least and most (n,) each, of the steps that all of them have."""
    series = [{r["step"]: r[key] for r in log
               if r.get("kind") == kind and isinstance(r.get(key), (int, float))} for log in logs]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    values = [[s[step] for s in series] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def pyplot():
    """matplotlib's, which only figures need: asked for before anything is measured."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("the figure needs the package matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot
    return matplotlib.pyplot


def beside_rows(name):
    """Path of a figure: in assets on the GPU whose rows are committed; elsewhere in the current folder."""
    return os.path.join(ASSETS if committed() else "", name)


def draw(panels, rows=1):
    """Panels of curves: (title, label of x, scale of x, scale of y, {label: (x, y)}); a curve may also give
    the edges of a band, (x, y, least, most). -> figure, its axes"""
    columns = len(panels) // rows
    figure, axes = pyplot().subplots(rows, columns, figsize=(min(6 * columns, 14), 4 * rows), squeeze=False,
                                constrained_layout=True)
    # Of a curve in every panel; its label may end in "(number)". Dashed black shows what else lies at zero.
    colors = {"exact": "k"}
    for axis, (title, x_label, x_scale, y_scale, curves) in zip(axes.flat, panels):
        for curve, (x, y, *band) in curves.items():
            color = colors.setdefault(curve.partition(" (")[0], f"C{len(colors) - 1}")
            axis.plot(x, y, "--" if color == "k" else "-", label=curve, linewidth=1.3, color=color)
            if band:
                axis.fill_between(x, *band, color=color, alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=x_label, xscale=x_scale, yscale=y_scale)
        if y_scale == "symlog":                  # logarithmic, with a place for exact zeros
            axis.set_yscale("symlog", linthresh=1e-6)
            axis.set_ylim(bottom=-1e-7)
        axis.grid(alpha=0.3)
        if axis is axes.flat[0] or curves.keys() != panels[0][-1].keys():       # one where all are equal
            beside = dict(loc="center left", bbox_to_anchor=(1, 0.5)) if len(curves) > 5 else {}
            axis.legend(fontsize=8, **beside)
    return figure, axes.flat


def save(figure, path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


CURVES = {"reward": "mean reward (dots: held-out accuracy)", "length": "mean completion, tokens",
          "entropy": "mean of -log p, nats a token", "mean_dlogp": "mean |log p sampler - log p trainer|",
          "k3": "KL(sampler || trainer), k3 estimate", "clipped": "share of tokens beyond the clip"}


def plot(runs, path):
    """Curves of each run by step. Names that differ in a trailing -sN alone are seeds: mean and band. A run
    is named after its folder, or the file where it is not log.jsonl."""
    if not runs:
        raise ValueError("plot needs run folders: python bench.py plot runs/NAME [runs/NAME ...]")
    names = [os.path.basename(re.sub(r"(/log)?\.jsonl$", "", os.path.abspath(run))) for run in runs]
    logs = {}
    for run, name in zip(runs, names):
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} of the runs are called {name}: seeds end in -s1, -s2, ..")
        name, log = re.sub(r"-s\d+$", "", name), read_log(run)
        if not any(r.get("kind") == "step" for r in log):
            raise ValueError(f"{run}: its log has no step to draw")
        for r in log:
            r["clipped"] = r.get("clipped_low", 0) + r.get("clipped_high", 0)
        logs.setdefault(name, []).append(log)
    figure, axes = draw([
        (title, "step", "linear", "symlog" if key in ("mean_dlogp", "k3") else "linear",
         {f"{name} ({len(seeds)})": over_seeds(seeds, "step", key) for name, seeds in logs.items()})
        for key, title in CURVES.items()], rows=2)
    for i, seeds in enumerate(logs.values()):
        steps, mean, least, most = over_seeds(seeds, "eval", "accuracy")
        axes[0].plot(steps, mean, "o", color=f"C{i}", markersize=5)
        axes[0].vlines(steps, least, most, color=f"C{i}", linewidth=1)
    save(figure, path)


# ---- the command line --------------------------------------------------------------------------------------

SECTIONS = {"exact": exact, "gemm": gemm, "quant": quant, "block": block, "optimizer": optimizer,
            "attention": attention_section, "head": head, "decode": decode, "rollout": rollout_section,
            "train": train_section, "step": step_section, "rules": rules, "mismatch": mismatch,
            "moves": moves}
ON_CPU = "exact", "mismatch", "moves"     # with --quick


def run_sections(names, folders, out, quick):
    """Runs the sections in turn, merging after each, also after one that failed; -> exit code."""
    cuda, rows, skipped = torch.cuda.is_available(), [], False
    print(" | ".join(f"{k} {v}" for k, v in machine().items()))
    for name in names:
        if not cuda and not (name in ON_CPU and quick):
            print(f"{name}: needs a CUDA device, and torch sees none"
                  + (" (--quick runs a tiny version on the CPU)" if name in ON_CPU else ""))
            skipped = True
            continue
        torch.manual_seed(0)
        began = time.time()
        try:
            SECTIONS[name](rows, quick, *folders)
        finally:
            if out:
                merge(out, rows)
        print(f"{name}: {time.time() - began:.0f} s")
    print(json.dumps(machine() | {"rows": rows}))
    return int(skipped or any(r["differing"] + r["pages_differing"] for r in rows
                              if r["section"] == "exact" and r["precision"] == "fp8"))


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", help=f"{', '.join(SECTIONS)}; or plot and run folders; "
                                                    "folders of checkpoints after mismatch or moves")
    parser.add_argument("--out", help="JSON file to merge into; for plot, the picture [assets/runs.png]")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_intermixed_args()
    out = args.out
    if out is None and not args.quick and committed():
        out = os.path.join(ASSETS, "bench_h200.json")
    if args.sections[0] == "plot":
        return plot(args.sections[1:], args.out or os.path.join(ASSETS, "runs.png"))
    names, folders = args.sections, []
    if names[0] in ("mismatch", "moves"):
        names, folders = names[:1], names[1:]
    for name in names:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(SECTIONS)}"
            raise ValueError(f"unknown section '{name}': {hint}")
    if out:
        read_results(out)               # a file of another GPU is refused now, not after the measurements
    if not args.quick and set(names) & {"mismatch", "moves"}:
        pyplot()
    return run_sections(names, folders, out, args.quick)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.exit(explain(error, "the load of this GPU, or add --quick"))
    except KeyboardInterrupt:
        sys.exit("interrupted")
