"""
Everything that is claimed in numbers: exactness first, then the speed of each kernel beside a library's.

    python bench.py exact                       # sampler and trainer, bit by bit; exits with 1 if one differs
    python bench.py gemm quant block optimizer  # products, quantizers, a whole layer, AdamW: random data
    python bench.py attention head              # the kernels that stay in BF16
    python bench.py decode rollout              # steps of the sampler at real shapes, whole batches
    python bench.py train step                  # updates at real shapes; rollout and update together
    python bench.py rules                       # what each rule of the numerics contract costs
    python bench.py mismatch FOLDER ...         # what lifting it does, on these checkpoints -> a figure
    python bench.py moves FOLDER ...            # what an update of the policy changes -> a figure
    python bench.py plot runs/a runs/b          # curves of training -> assets/runs.png (needs matplotlib)

Each section prints a table; the last line on stdout is one JSON object, whose rows are merged into --out
(default assets/bench_h200.json, on an H200 alone). --quick runs fewer sizes and merges only where --out names
a file.

How to read a row: `us` is the median of one call, and `spread` the distance from the 10th to the 90th
percentile as a share of it. `of_limit` is the share of what the hardware allows: the larger of the time for
the operations (dense tensor peak) and for the bytes that have to move (copy rate, measured in the same run).
`x_name` is the time of that alternative over ours: above 1, ours is faster. `plain` is the readable Triton
kernel beside a faster one, `bf16` cuBLAS (for `block` our own layer in BF16), `cublaslt` its blockwise FP8
product, `deepgemm` the package of that name, which is compared with where it is installed, `torch` what torch
offers without kernels of one's own. Inputs rotate over more memory than the L2 cache holds.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
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

HERE = os.path.dirname(os.path.abspath(__file__))
FP8_PEAK, BF16_PEAK = 1979e12, 989e12     # dense tensor operations a second of an H100 SXM or H200
COLD = 150e6                              # bytes that no L2 cache holds (50 MB on an H200)

# ---- tables and the JSON file ------------------------------------------------------------------------------


class Table:
    """Rows of one section, printed and added to `rows` as they come: a run that dies keeps its results."""

    def __init__(self, section, rows, *columns, key="shape"):
        self.section, self.rows, self.columns, self.key = section, rows, columns, key
        self.commit = git_commit()
        print(f"\n{section:18} {key:34} " + " ".join(f"{c:>9}" for c in columns))

    def add(self, case, where, **values):
        """One row. Values under `columns` are printed, all are kept; None stands for not measured."""
        values = {name: value for name, value in values.items() if value is not None}
        row = {"section": self.section, "case": case, self.key: where, "commit": self.commit, **values}
        self.rows.append(row)
        cells = " ".join(f"{show(row.get(c)):>{max(9, len(c))}}" for c in self.columns)
        print(f"{case:18} {where:34} {cells}", flush=True)


    def means(self):
        """One more row for each case: the geometric means of its ratios."""
        cases = {}
        for row in self.rows:
            if row["section"] == self.section:
                cases.setdefault(row["case"], []).append(row)
        for case, rows in cases.items():
            ratios = {name: [row[name] for row in rows if name in row]
                      for name in self.columns if name.startswith("x_")}
            self.add(case, "geometric mean",
                     **{name: math.exp(sum(map(math.log, x)) / len(x)) for name, x in ratios.items() if x})


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
    triton = fp8.triton.__version__ if fp8.triton else "absent"
    command = " ".join(["python", *sys.argv])
    versions = {"torch": torch.__version__, "triton": triton}
    if deep_gemm():
        versions["deep_gemm"] = deep_gemm().__version__
    return {"gpu": name, **versions, "command": command}


note = functools.cache(print)                    # each message once


@functools.cache
def deep_gemm():
    """The package DeepGEMM, or None: nothing here needs it, but it is the one to compare with."""
    try:
        import deep_gemm
        return deep_gemm
    except ImportError:
        return None
    except (OSError, RuntimeError) as error:     # installed, but its libraries or its compiler are not found
        note(f"note: deep_gemm cannot be loaded: {str(error).strip().splitlines()[0][:150]}")
        return None


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


def measure(calls, graph=True, budget_s=0.1):
    """Microseconds of one call and their spread, as by `compare`."""
    return compare({"": calls}, graph, budget_s)[""]


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


def compile_ahead(calls):
    """Runs each call once, side by side: a kernel takes one core a second to compile, and there are many."""
    began = time.time()
    calls[0]()                                        # alone: it starts Triton
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda call: call(), calls))    # the list raises what a call raised
    torch.cuda.empty_cache()
    print(f"kernels compiled in {time.time() - began:.0f} s")


def allowed(library, call):
    """What `call` returns, or None where the library refuses: an empty column, and the reason printed."""
    try:
        return call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        note(f"note: {library} is not measured everywhere: {str(error).strip().splitlines()[0][:150]}")
        return None


def over(theirs, ours):
    return None if theirs is None else theirs / ours


def check_close(what, got, want, tolerance):
    """A kernel is only worth timing if it computes the same thing; NaN fails too."""
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"{what}: relative difference {error:.2e} from the reference, "
                           f"expected <= {tolerance:.0e}")


@functools.cache
def copy_rate():
    """Bytes a second of a large copy, read and written both counted: the ceiling of this very card.

    By a kernel, not by copy_: in a graph that is a memcpy node, which from 512 MiB on runs at 2.7 TB/s on an
    H200, where a kernel reaches 4.2 or more.
    """
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")          # 2 GiB
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / (measure([lambda: torch.mul(source, 1, out=target)])[0] * 1e-6)
    print(f"copy rate of this GPU: {rate / 1e12:.2f} TB/s")
    return rate


def limit_us(bytes_moved, flops=0, peak=BF16_PEAK):
    return max(bytes_moved / copy_rate(), flops / peak) * 1e6


def randn(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


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
# slots, completions, longest response, longest prompt. The first completion has the longest response.
EXACT_BATCHES = [(1, 9, 1024, 700), (7, 21, 2048, 700), (64, 129, 4096, 700), (300, 450, 4096, 700)]
EXACT_LONG = (16, 24, 16384, 700)        # for the last model alone: 16k tokens of response
EXACT_QUICK = [(1, 3, 20, 70), (7, 12, 80, 70)]


def exact_model(name, precision, kv, device, seed):
    """Weights that are not Gaussian: a quarter of the 128x128 blocks is scaled by 2^-12 .. 2^8, some are 0.

    Each band of 128 output rows is then brought to a size of its own, within 2^6: no band drowns the others.
    """
    family, hidden, width, H, G, D, tied = EXACT_MODELS[name]
    config = Config(vocab_size=2000, hidden_size=hidden, intermediate_size=width, num_hidden_layers=2,
                    num_attention_heads=H, num_key_value_heads=G, head_dim=D, max_position_embeddings=17408,
                    model_type=family, rope_theta=1e4, tie_word_embeddings=tied)
    model = Transformer(config, precision, device, seed=None, kv=kv)
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
    """Pages that decode wrote, against what the packed pass writes for them: (compared, differing)."""
    compared = differing = 0
    for index, mine in seen.items():
        prompt, completion = sequences[index]
        tokens = torch.tensor((prompt + completion)[:-1], device=mine[0][0].device)    # the last: never fed
        count = -(-len(tokens) // PAGE)
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

    inv_temp = torch.full((1,), 1 / temperature, device=model.head.data.device)
    order, scores, pending, size = list(range(completions)), {}, [], 0
    rng.shuffle(order)
    for at, i in enumerate(order):
        pending.append(i)
        size += sum(map(len, sequences[i]))
        if size > 16384 or at == completions - 1:                    # a micro-batch of the trainer
            with torch.no_grad():
                logprobs = score(model, [sequences[j] for j in pending], inv_temp).cpu()
            scores |= zip(pending, logprobs.split([len(sequences[j][1]) for j in pending]))
            pending, size = [], 0
    gap = grpo.mismatch(torch.cat(out.logprobs), torch.cat([scores[i] for i in range(completions)]))
    fp8_flow = model.precision == "fp8"          # only there prefill and decode are promised to agree
    pages, bad_pages = compare_pages(model, sampler.seen, sequences) if fp8_flow else (None, None)
    table.add(f"{slots} slots", name, precision=model.precision, kv=model.kv, tokens=out.n_tokens,
              differing=int(gap["differing_tokens"]), share=float(gap["differing"]),
              pages=pages, pages_differing=bad_pages, mean_dlogp=float(gap["mean_dlogp"]),
              max_dlogp=float(gap["max_dlogp"]), longest=max(map(len, out.tokens)),
              preemptions=out.preemptions, seconds=time.time() - began)


def exact(rows, quick):
    """All models in fp8 at all batch sizes, the last also at length and with FP8 KV; then one in the other
    precisions, for contrast."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("exact", rows, "precision", "kv", "tokens", "differing", "pages", "pages_differing",
                  "mean_dlogp", "max_dlogp", "longest", "preemptions", "seconds", key="model")
    batches, models = (EXACT_QUICK, list(EXACT_MODELS)[:2]) if quick else (EXACT_BATCHES, list(EXACT_MODELS))
    runs = [(name, "fp8", "bf16", batches) for name in models[:-1]]
    runs += [(models[-1], "fp8", kv, batches + [EXACT_LONG] * (not quick)) for kv in ("bf16", "fp8")]
    runs += [(models[0], precision, "bf16", batches[-2:-1]) for precision in ("fp8-rollout", "bf16")]
    for seed, (name, precision, kv, cases) in enumerate(runs):
        model = exact_model(name, precision, kv, device, seed if precision == "fp8" else 0)
        for batch in cases:
            exact_case(table, name, model, batch)
    ours = [r for r in rows if r["section"] == "exact" and r["precision"] == "fp8"]
    print(f"fp8: {sum(r['differing'] for r in ours):,} of {sum(r['tokens'] for r in ours):,} tokens and "
          f"{sum(r['pages_differing'] for r in ours):,} of {sum(r['pages'] for r in ours):,} KV pages differ")


# ---- gemm: the three products, and decode ------------------------------------------------------------------

# Qwen3: (hidden, query heads, MLP width); 8 key/value heads of 128 everywhere.
QWEN3 = {"0.6B": (1024, 16, 3072), "1.7B": (2048, 16, 6144), "4B": (2560, 32, 9728), "8B": (4096, 32, 12288)}


def layer_shapes(size):
    """{layer: (N, K)}: output and input features of the four matrices of a block."""
    C, H, width = QWEN3[size]
    return {"qkv": ((H + 16) * 128, C), "o": (C, H * 128), "gate_up": (2 * width, C), "down": (C, width)}


def cublaslt(a, scale_a, b, scale_b, blocks):
    """A call of cuBLASLt's blockwise product a b^T on our codes and scales; None if torch has no scaled_mm.

    a (M, K) has 1x128 scales, given as (K/128, M); b (N, K) has the same, or 128x128 `blocks` as
    (N/128, K/128), which it reads in lines of a multiple of 4.
    """
    if not hasattr(F, "scaled_mm"):
        return None
    row, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    if blocks:
        scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous()
    return lambda: F.scaled_mm(a, b.t(), scale_a.t(), row, scale_b.t(), block if blocks else row)


def deepgemm(a, scale_a, b, scale_b, blocks):
    """The same by DeepGEMM, None without the package. Without `blocks` it adds to FP32, as WGrad wants it."""
    if not deep_gemm():
        return None
    if blocks:
        out = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=a.device)
        options = {}
    else:
        out, scale_b = torch.zeros(len(a), len(b), device=a.device), scale_b.t()
        options = {"c": out, "recipe": (1, 1, 128)}
    left, right = (a, scale_a.t()), (b, scale_b)
    return lambda: (deep_gemm().fp8_gemm_nt(left, right, out, **options), out)[1]


def plain_tile(M):
    """The fastest tile of the plain kernel for M tokens: a few of them are narrow, and features the rows."""
    if M > 128:
        return 128, 128, False, 8, 4
    return (16, 64, True, 4, 8) if M <= 16 else (32, 64, True, 4, 8) if M <= 32 else (64, 64, True, 4, 6)


def row_calls(x, w, codes, scales):
    """x w^T -> {who: call}; w (N, K) is given in BF16 and as codes. None: not to be had."""
    q, s = fp8.quantize_rows(x)
    few = len(x) <= 256
    return {"ours": lambda: fp8.fprop(q, s, codes, scales),
            "plain": lambda: fp8.fprop(q, s, codes, scales, tile=plain_tile(len(x))),
            "bf16": lambda: torch.mm(x, w.t()),
            "cublaslt": None if few else cublaslt(q, s, codes, scales, True),    # for a few rows behind BF16
            "deepgemm": deepgemm(q, s, codes, scales, True)}


def fprop_calls(M, N, K):
    w = randn(N, K)
    return row_calls(randn(M, K), w, *fp8.quantize_blocks(w))


def dgrad_calls(M, N, K):
    w = randn(N, K)
    codes, scales = fp8.quantize_blocks(w)
    return row_calls(randn(M, N), w.t(), fp8.transpose_codes(codes), scales.t())


def wgrad_calls(M, N, K):
    """Ours and DeepGEMM add to an FP32 gradient (8 bytes an element move), cuBLAS writes BF16 (2 bytes)."""
    dy, x, out = randn(M, N), randn(M, K), torch.zeros(N, K, device="cuda")
    (dc, ds), (xc, xs) = fp8.quantize_cols(dy), fp8.quantize_cols(x)
    plain = torch.zeros_like(out)
    return {"ours": lambda: (fp8.wgrad(dc, ds, xc, xs, out), out)[1],
            "plain": lambda: (fp8.wgrad(dc, ds, xc, xs, plain, tile=(8, 4)), plain)[1],
            "bf16": lambda: torch.mm(dy.t(), x),
            "cublaslt": cublaslt(dc, ds, xc, xs, False),
            "deepgemm": deepgemm(dc, ds, xc, xs, False)}


PRODUCTS = {"fprop": fprop_calls, "dgrad": dgrad_calls, "wgrad": wgrad_calls, "decode": fprop_calls}
# Relative difference from ours that is allowed. The plain kernel has the same bits. E4M3 keeps 3 bits after
# the leading one: about 2.6 % on an operand, 3.7 % on a product of random values.
OTHERS = {"plain": 0, "bf16": 0.05, "cublaslt": 0.005, "deepgemm": 0.005}


def gemm_row(table, case, where, M, N, K):
    """Time one product at one shape, and each alternative after its result is found to be right."""
    flops = 2 * M * N * K
    # All three matrices once at a byte an element, and what the result has more: FP32 in and out, or BF16.
    bytes_moved = M * (N + K) + N * K + {"wgrad": 7 * N * K, "dgrad": M * K}.get(case, M * N)
    sets = [PRODUCTS[case](M, N, K) for _ in range(max(2, math.ceil(COLD / bytes_moved)))]
    want, correct = sets[0]["ours"](), {}
    for name, tolerance in OTHERS.items():
        got = allowed(name, sets[0][name]) if sets[0].get(name) else None
        if got is not None:
            check_close(f"{case} {where}: {name}", got, want, tolerance)
            correct[name] = [s[name] for s in sets]
    del want, got
    times = compare({"ours": [s["ours"] for s in sets], **correct})
    ours, spread = times.pop("ours")
    us = {name: t for name, (t, _) in times.items()}
    table.add(case, where, us=ours, tflops=flops / ours / 1e6, tb_per_s=bytes_moved / ours / 1e6,
              of_limit=limit_us(bytes_moved, flops, FP8_PEAK) / ours, spread=spread,
              **{f"x_{name}": time / ours for name, time in us.items()},
              **{f"{name}_us": time for name, time in us.items()})


def gemm(rows, quick):
    copy_rate()
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
    w, scale = fp8.Weight((C,), device="cuda"), 4 / 128
    w.write(torch.rand(C) + 0.5)
    rstd = torch.rand(M, device="cuda") + 0.5
    on = lambda f, *shapes: lambda: functools.partial(f, *(randn(*s) for s in shapes))

    def transpose():
        codes = fp8.quantize_blocks(randn(2 * width, C))[0]
        return lambda: fp8.transpose_codes(codes)
    x, mlp, matrix = (M, C), (M, width), (2 * width, C)
    return {
        "quantize_rows": (x, 3 + scale, on(fp8.quantize_rows, x)),
        "quantize_cols": (x, 3 + scale, on(fp8.quantize_cols, x)),
        "quantize_rows_cols": (x, 4 + 2 * scale, on(fp8.quantize_rows_cols, x)),
        "quantize_blocks": (matrix, 3, on(fp8.quantize_blocks, matrix)),
        "transpose_codes": (matrix, 2, transpose),
        # read the residual and what is added to it, write their sum and the codes
        "add+norm+quantize": (x, 7 + scale, on(lambda h, d: fp8.norm_forward(h, d, w, 1e-6, True), x, x)),
        "norm backward": (x, 8, on(lambda dy, dh, h: fp8.norm_backward(dy, dh, h, rstd, w), x, x, x)),
        "norm to columns": (x, 3 + scale, on(lambda h: fp8.norm_operand(h, rstd, w, 1e-6, True), x)),
        "swiglu+quantize": (mlp, 5 + scale, on(lambda g: fp8.swiglu_forward(g, True), (M, 2 * width))),
        # read dY, gate and up, write their gradients and the columns of the product
        "swiglu backward": (mlp, 11 + scale,
                            on(lambda dy, g: fp8.swiglu_backward(dy, g, True), mlp, (M, 2 * width))),
    }


def quant(rows, quick):
    copy_rate()
    table = Table("quant", rows, "us", "tb_per_s", "of_limit", "spread")
    cases = [(size, *case) for size in (["8B"] if quick else QWEN3)
             for case in quant_cases(8192, QWEN3[size][0], QWEN3[size][2]).items()]
    compile_ahead([lambda make=make: make()() for _, _, (_, _, make) in cases])
    for size, case, (shape, per_element, make) in cases:
        bytes_moved = math.prod(shape) * per_element
        us, spread = measure([make() for _ in range(max(1, min(8, math.ceil(2 * COLD / bytes_moved))))])
        table.add(case, f"{size} {shape[0]} x {shape[1]}", us=us, tb_per_s=bytes_moved / us / 1e6,
                  of_limit=limit_us(bytes_moved) / us, spread=spread)


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


def block_model(size, precision):
    """One layer of that size, with random weights that are the same in every precision."""
    C, H, width = QWEN3[size]
    config = Config(vocab_size=128, hidden_size=C, intermediate_size=width, num_hidden_layers=1,
                    num_attention_heads=H, num_key_value_heads=8, head_dim=128, max_position_embeddings=1024,
                    model_type="qwen3", rope_theta=1e6, tie_word_embeddings=True)
    model, generator = Transformer(config, precision, "cuda", seed=None), torch.Generator("cuda")
    generator.manual_seed(0)
    draw = lambda shape: torch.randn(shape, device="cuda", generator=generator)
    return model.load((name, draw(w.shape) * (0.02 if len(w.shape) == 2 else 0.1) + (len(w.shape) == 1))
                      for name, w in model.weights().items())


def block_row(table, size, S, T):
    models = {precision: block_model(size, precision) for precision in ("fp8", "bf16")}
    C, H, _ = QWEN3[size]
    h, delta = randn(T, C, grad=True), randn(T, C, grad=True)
    grads, packing = (randn(T, C), randn(T, C)), pack([S] * (T // S), h.device)
    blocks = {name: (our_block(model, packing), ()) for name, model in models.items()}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        blocks[name] = torch_block(models["bf16"], S, backend)
    both = lambda run, leaves: torch.autograd.grad(run(h, delta), (h, delta, *leaves), grads)

    results = {}
    with torch.no_grad():
        for name, (run, _) in blocks.items():
            results[name] = allowed(f"torch with {name} attention", lambda: run(h, delta))
    blocks = {name: blocks[name] for name, got in results.items() if got}
    for name in blocks:                                # the residual stream, and what the MLP adds to it
        for got, want in zip(results[name], results["bf16"]):
            check_close(f"block {size}: {name}", got, want, 0.1)

    products = 2 * T * sum(N * K for N, K in layer_shapes(size).values())
    scores = 2 * T * S * H * 128                       # as in attention_rows
    with torch.no_grad():
        forward = compare({name: [functools.partial(run, h, delta)] for name, (run, _) in blocks.items()},
                          graph=False, budget_s=0.2)
    step = compare({name: [functools.partial(both, *pair)] for name, pair in blocks.items()},
                   graph=False, budget_s=0.2)
    for case, times, p, a in ("forward", forward, 1, 1), ("forward+backward", step, 3, 3.5):
        us, spread = times.pop("fp8")
        others = {name: t for name, (t, _) in times.items()}
        in_torch = [others[name] for name in ("flash", "cudnn") if name in others]
        table.add(case, f"{size}, {T // S} x {S} tokens", us=us,
                  tflops=(p * products + a * scores) / us / 1e6,
                  of_limit=(p * products / FP8_PEAK + a * scores / BF16_PEAK) * 1e6 / us,
                  x_bf16=others["bf16"] / us, x_torch=min(in_torch) / us if in_torch else None, spread=spread,
                  **{f"{name}_us": t for name, t in others.items()})


def block(rows, quick):
    table = Table("block", rows, "us", "tflops", "of_limit", "x_bf16", "x_torch", "spread")
    sizes, S, T = (["8B"] if quick else list(QWEN3)), 1024, 8192

    def compile_one(size, precision):
        run = our_block(block_model(size, precision), pack([S] * (T // S), "cuda"))
        h, delta = randn(T, QWEN3[size][0], grad=True), randn(T, QWEN3[size][0], grad=True)
        with torch.autograd.set_multithreading_enabled(False):       # the backward pass in this very thread
            torch.autograd.grad(run(h, delta), (h, delta), (randn(*h.shape), randn(*h.shape)))
    compile_ahead([functools.partial(compile_one, size, p) for size in sizes for p in ("fp8", "bf16")])
    for size in sizes:
        block_row(table, size, S, T)
    table.means()


# ---- optimizer: AdamW that writes the codes, against torch's and a quantizer after it ----------------------


def our_adamw(start):
    """{name: first FP32 values} -> AdamW over FP8 weights, with random gradients."""
    weights = {name: fp8.Weight(x.shape, device="cuda", keep="codes") for name, x in start.items()}
    ours = fp8.AdamW(weights, (0.9, 0.95), 1e-8, 0.1, lambda name: True)
    ours.load(start.items())
    ours.grads.normal_()
    return ours


def layer_matrices(size):
    return {name: torch.randn(shape, device="cuda") * 0.02 for name, shape in layer_shapes(size).items()}


def optimizer_row(table, size):
    """A step on the matrices of one layer: gradient norm, clipping, update, codes, gradients cleared."""
    start = layer_matrices(size)
    ours, parameters = our_adamw(start), [torch.nn.Parameter(x) for x in start.values()]
    theirs = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    codes = [fp8.quantize_blocks(x) for x in start.values()]
    for w, p in zip(ours.weights.values(), parameters):
        p.grad = w.grad.clone()

    def separate():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        theirs.step()
        for p, out in zip(parameters, codes):
            fp8.quantize_blocks(p.detach(), out=out)
        theirs.zero_grad(set_to_none=False)
    ours.step(1e-4, 1.0), separate()
    for name, p in zip(start, parameters):
        check_close(f"AdamW {size} {name}", ours.master[name], p.detach(), 1e-6)
    times = compare({"ours": [lambda: ours.step(1e-4, 1.0)], "torch": [separate]}, graph=False)
    (us, spread), (torch_us, _) = times["ours"], times["torch"]
    # Gradient: read for its norm and for the update, then cleared. Master, moments: read, written. Codes.
    bytes_moved = 37 * sum(p.numel() for p in parameters)
    table.add("adamw", f"{size}, one layer", us=us, tb_per_s=bytes_moved / us / 1e6,
              of_limit=limit_us(bytes_moved) / us, x_torch=torch_us / us, torch_us=torch_us, spread=spread)


def optimizer(rows, quick):
    copy_rate()
    table = Table("optimizer", rows, "us", "tb_per_s", "of_limit", "x_torch", "spread")
    sizes = ["8B"] if quick else list(QWEN3)
    compile_ahead([lambda size=size: our_adamw(layer_matrices(size)).step(1e-4, 1.0) for size in sizes])
    for size in sizes:
        optimizer_row(table, size)
    table.means()


# ---- attention ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic():
    """torch's flash attention without atomics in its backward pass, as ours; no filling of empty tensors."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    outputs = {"ours": run["ours"]()}

    def gradient(name):
        o = outputs[name]
        inputs = (q, k, v) if name == "ours" else batched
        return torch.autograd.grad(o, inputs, do.view(o.shape), retain_graph=True)

    def ordered():
        with deterministic():
            return gradient("sdpa")

    for name in ("sdpa", "cudnn"):
        outputs[name] = allowed(name, run[name])
        if outputs[name] is None:
            del outputs[name]
            continue
        for mine, theirs in zip((outputs["ours"], *gradient("ours")), (outputs[name], *gradient(name))):
            check_close(f"attention {where}: {name}", theirs.reshape(mine.shape), mine, 0.02)

    with torch.no_grad():
        forward = compare({name: [run[name]] for name in outputs})
    backward = {name: [functools.partial(gradient, name)] for name in outputs}
    if "sdpa" in outputs:
        backward["sdpa_deterministic"] = [ordered]
    flops = 2 * T * S * H * D                # two products of T x S/2 scores: the causal half
    for case, times, work in ("forward", forward, 1), ("backward", compare(backward, graph=False), 2.5):
        us, spread = times.pop("ours")
        table.add(case, where, us=us, tflops=work * flops / us / 1e6,
                  of_limit=work * flops / BF16_PEAK * 1e6 / us, spread=spread,
                  **{f"x_{name}": t / us for name, (t, _) in times.items()})


def paged_row(table, B, length, H, G, D, fp8_kv=False):
    """One decode step of B sequences over shuffled pages, against the bytes of their keys and values."""
    each = -(-length // PAGE)
    cache = empty_cache(B * each, G, D, fp8_kv, torch.bfloat16, "cuda")
    for x in cache:
        x.copy_(randn(*x.shape))
    pages = torch.randperm(B * each, device="cuda").int().view(B, each)
    lengths, q = torch.full((B,), length, dtype=torch.int32, device="cuda"), randn(B, H, D)
    us, spread = measure([lambda: paged_attention(q, cache, pages, lengths)])
    bytes_moved = sum(x.nbytes for x in cache) + 4 * B * H * D
    table.add("decode", f"{B} x {length}, heads {H}/{G} x {D}", kv="fp8" if fp8_kv else "bf16", us=us,
              tb_per_s=bytes_moved / us / 1e6, of_limit=limit_us(bytes_moved) / us, spread=spread)


def attention_section(rows, quick):
    copy_rate()
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
    weight = fp8.Weight((V, C), device="cuda")
    weight.write(torch.randn(V, C, device="cuda") * C ** -0.5)
    hidden, targets = randn(T, C, grad=True), torch.randint(V, (T,), device="cuda")
    w, where = weight.data.detach().requires_grad_(), f"{T} tokens, C{C} V{V}"
    inv_temp, grad = torch.ones(1, device="cuda"), torch.ones(T, device="cuda")
    ours = lambda: token_logprobs(hidden, weight, targets, inv_temp)
    check_close(f"log-probs {where}", ours(), chunked_cross_entropy(hidden, w, targets, False), 0.01)
    flops = 2 * T * C * V
    theirs = lambda backward: [lambda: chunked_cross_entropy(hidden, w, targets, backward)]
    with torch.no_grad():
        forward = compare({"ours": [ours], "torch": theirs(False)})
    # Ours forms the logits twice, theirs once: the operations counted are the three products that are needed.
    ours_too = [lambda: torch.autograd.grad(ours(), hidden, grad)]
    step = compare({"ours": ours_too, "torch": theirs(True)}, False)
    for case, times, products in ("forward", forward, 1), ("forward+backward", step, 3):
        us, spread = times["ours"]
        table.add(case, where, us=us, tflops=products * flops / us / 1e6,
                  of_limit=products * flops / BF16_PEAK * 1e6 / us, x_torch=times["torch"][0] / us,
                  spread=spread)
    noise, seed = torch.ones(1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    for B in (64, 256):
        x, keys = hidden[:B].detach(), torch.arange(B, device="cuda")
        positions = keys.int()
        us, spread = measure([lambda: sample(x, weight, inv_temp, noise, seed, keys, positions)])
        table.add("sample", f"{B} tokens, C{C} V{V}", us=us, tb_per_s=2 * V * C / us / 1e6,
                  of_limit=limit_us(2 * V * C, 2 * B * C * V) / us, spread=spread)


def head(rows, quick):
    copy_rate()
    table = Table("head", rows, "us", "tflops", "tb_per_s", "of_limit", "x_torch", "spread")
    for C in [2048] if quick else [1024, 2048, 4096]:
        head_rows(table, 8192, C, 151936)


# ---- decode: one step of the sampler -----------------------------------------------------------------------

LAYERS = {"1.7B": 28, "4B": 36, "8B": 36}
FLOWS = [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8")]     # precision of linears, of KV


def random_model(size, precision, kv):
    """A Qwen3 of real shapes with random weights, made on the GPU; the head is untied at 8B only."""
    torch.cuda.empty_cache()
    C, H, width = QWEN3[size]
    config = Config(vocab_size=151936, hidden_size=C, intermediate_size=width, num_hidden_layers=LAYERS[size],
                    num_attention_heads=H, num_key_value_heads=8, head_dim=128, max_position_embeddings=20480,
                    model_type="qwen3", rope_theta=1e6, tie_word_embeddings=size != "8B", eos_token_id=[0])
    model = Transformer(config, precision, "cuda", seed=None, kv=kv)
    return model.load((name, randn(*w.shape) * 0.02 if len(w.shape) > 1 else torch.ones(w.shape))
                      for name, w in model.weights().items())


def step_bytes(sampler, B, context):
    """What a decode step has to read: all weights but the embedding (unless it is the head) once, and KV."""
    model = sampler.model
    read = [w for w in model.weights().values() if w is model.head or w is not model.embedding]
    return (sum(buffer.nbytes for w in read for buffer in w.buffers())
            + B * context * sampler._page_bytes() // PAGE)


@contextlib.contextmanager
def only_80_gb():
    """Takes the rest of this GPU's memory away."""
    torch.cuda.empty_cache()
    rest = max(0, torch.cuda.mem_get_info()[0] - 80 * 10**9)
    taken = torch.empty(rest, dtype=torch.uint8, device="cuda")
    yield
    del taken


def at_context(sampler, B, context):
    """Sets the sampler's rows as if B sequences had come so far; their pages lie scattered in the pool."""
    each, row = pages_for(context + 64), torch.arange(B, device="cuda")
    sampler.table[:B, :each] = torch.randperm(B * each, device="cuda").int().view(B, each) + 1
    at = context - 1                                                     # position of the current token
    sampler.ids[:3, :B] = torch.stack([row, row, sampler.table[:B, at // PAGE].long() * PAGE + at % PAGE])
    sampler.spans[:, :B] = torch.tensor([[at], [context], [1 << 30]], device="cuda")
    sampler.ids[3] = 0


def fill(pool):
    for pages in sum(pool.caches, ()):
        pages.copy_(randn(*pages.shape))


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
    """Median time of a step, in microseconds. A step moves the rows on by one token: 64 of them at most."""
    graph, times = sampler._graph(B), []
    at_context(sampler, B, context)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        torch.cuda._sleep(100_000)                                       # the launch is no part of a step
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        sampler.ids[3] = 0
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def decode(rows, quick):
    """Steps of the captured graph; `gap` is the share of the time in which no kernel runs."""
    copy_rate()
    table = Table("decode", rows, "precision", "kv", "us", "tok_per_s", "tb_per_s", "of_limit", "x_bf16",
                  "kernels", "gap", key="model")
    sizes, batches = (["1.7B"], (64,)) if quick else (LAYERS, (1, 16, 64, 256))
    bf16 = {}
    for size in sizes:
        for precision, kv in FLOWS:
            model = random_model(size, precision, kv)
            sampler = Sampler(model)
            width = pages_for(16384 + 64)
            most = min(sampler._pages_in_memory(max(batches), width), 256 * width + 1)
            sampler._build(max(batches), width, most)
            fill(sampler.pool)
            with torch.no_grad():
                for B, context in itertools.product(batches, (1024,) if quick else (256, 1024, 4096, 16384)):
                    if B * pages_for(context + 64) >= most:
                        continue
                    us = decode_cell(sampler, B, context)
                    if (precision, kv) == FLOWS[0]:
                        bf16[size, B, context] = us
                    moved = step_bytes(sampler, B, context)
                    kernels, busy = kernels_of(sampler._graph(B).replay) if context == 1024 else (None, None)
                    table.add(f"{B} x {context}", size, precision=precision, kv=kv, us=us,
                              tok_per_s=B / us * 1e6, tb_per_s=moved / us / 1e6,
                              of_limit=limit_us(moved) / us, x_bf16=over(bf16.get((size, B, context)), us),
                              kernels=kernels, gap=busy and 1 - busy / us)
            del model, sampler


# ---- rollout: whole batches of completions -----------------------------------------------------------------


def rollout_request(prompts, n, longest):
    """Prompts of 100 to 300 tokens, and long-tailed lengths: half of them below a tenth of the longest."""
    rng = random.Random(0)
    ids = [[rng.randrange(151936) for _ in range(rng.randint(100, 300))] for _ in range(prompts)]
    return ids, [min(longest, 1 + int(longest / 10 * math.exp(rng.gauss(0, 1)))) for _ in range(prompts * n)]


def rollout_row(table, model, size, bf16, prompts, n, limits, case, slots=256, theirs=None):
    """generate() with its graphs captured before: a training run captures them once. `bf16` keeps the rates
    of that flow."""
    sampler = Sampler(model, max_slots=slots)
    limits = [limits] * (len(prompts) * n) if isinstance(limits, int) else limits
    everything = range(model.config.vocab_size)
    sampler.generate(prompts, n, limits, stop=everything)                           # each stops at once
    for few in (1, 2, 4, 8, 16, 32):                                                # prefills of every size
        sampler.generate(prompts[:few], n, limits[:few * n], stop=everything)
    for B in BUCKETS:
        if B <= sampler.slots:
            sampler._graph(B)
    out = sampler.generate(prompts, n, limits, stop=[])
    if (model.precision, model.kv) == FLOWS[0]:
        bf16[size, case] = out.tok_per_s
    rate = bf16.get((size, case))
    table.add(case, size, precision=model.precision, kv=model.kv, tok_per_s=out.tok_per_s,
              x_bf16=rate and out.tok_per_s / rate, x_transformers=theirs and out.tok_per_s / theirs,
              occupancy=out.occupancy, seconds=out.seconds, tokens=out.n_tokens, steps=out.steps,
              preemptions=out.preemptions)
    sampler.release()


def transformers_model():
    """The library's model at the 1.7B shape, in BF16, or None where it is not installed."""
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        return note("note: transformers is not installed: no x_transformers")
    C, H, width = QWEN3["1.7B"]
    config = Qwen3Config(vocab_size=151936, hidden_size=C, intermediate_size=width,
                         num_hidden_layers=LAYERS["1.7B"], num_attention_heads=H, num_key_value_heads=8,
                         head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
                         eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).bfloat16()


def transformers_rate(prompts, new):
    """Tokens/s of transformers' generate, or None where it is not installed."""
    theirs = transformers_model()
    if theirs is None:
        return None
    ids = torch.tensor(prompts, device="cuda")
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
    longest, bf16 = 256 if quick else 4096, {}
    for size in ["1.7B"] if quick else ["8B", "1.7B"]:
        square = [[i] * 128 for i in range(256)]
        theirs = transformers_rate(square, 128) if size == "1.7B" else None
        for precision, kv in FLOWS:
            row = functools.partial(rollout_row, table, random_model(size, precision, kv), size, bf16)
            if size == "1.7B":
                row(square, 1, 128, "256 x (128 + 128)", theirs=theirs)
            else:
                for B in 64, 256:
                    row(square[:B], 1, 512, f"{B} x (128 + 512)")
            prompts, limits = rollout_request(64, 8, longest)
            row(prompts, 8, limits, f"64 x 8 up to {longest}")
            del row
    if not quick:
        with only_80_gb():
            prompts, limits = rollout_request(64, 8, 16384)
            rollout_row(table, random_model("1.7B", "fp8", "bf16"), "1.7B", {}, prompts, 8, limits,
                        "64 x 8 up to 16384, 80 GB", slots=None)


# ---- train: forward, backward, optimizer; step: rollout and update -----------------------------------------

BATCH = 4                                 # micro-batches of a batch: 1 update of all, or 4 of one each


def trained_model(size, precision, **flags):
    """-> flags, model and optimizer. On one H200 8B runs its layers again in the backward pass, and has
    masters and moments in BF16."""
    large = size == "8B"
    cfg = dataclasses.replace(train.Config(precision=precision, micro_tokens=16384, recompute=large,
                                           states="bf16" if large else "fp32"), **flags)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = random_model(size, precision, "bf16")
    model.recompute = cfg.recompute
    return cfg, model, fp8.AdamW(model.weights(), (0.9, 0.95), 1e-8, 0.0, decay=lambda name: False,
                                 states=train.STATES[cfg.states])


def random_pairs(count, length):
    """(prompt, completion) pairs of `length` fed tokens each, of which all but the first are learned."""
    return [([0], torch.randint(151936, (length,)).tolist()) for _ in range(count)]


def loss_of(model, pairs, inv_temp, total):
    """The trainer's loss of one micro-batch, with advantages that differ."""
    logp = score(model, pairs, inv_temp)
    advantage = torch.linspace(-1, 1, len(logp), device="cuda")
    return grpo.policy_loss(logp, logp.detach(), advantage, total)[0]


def timed(parts, repeats=2):
    """Seconds of each of the callables `parts`, which run in turn: the least of a few, gaps included."""
    runs = []
    for _ in range(1 + repeats):                     # the first run compiles and takes its memory
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for part, event in zip(parts, events[1:]):
            part()
            event.record()
        events[-1].synchronize()
        runs.append([a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])])
    return [min(x) for x in zip(*runs[1:])]


def update_seconds(model, optimizer, count, length):
    """Seconds of a pass for old log-probs, forward, backward and optimizer on `count` sequences."""
    pairs, one, loss = random_pairs(count, length), torch.ones(1, device="cuda"), []

    def old():
        with torch.no_grad():
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


def train_rows(table, size, lengths, bf16):
    """Both precisions at each length; `bf16` collects what fp8 is compared with."""
    for precision in ("bf16", "fp8"):
        _, model, optimizer = trained_model(size, precision)
        for length in lengths:
            tokens = 16384 * BATCH
            old, forward, backward, step = update_seconds(model, optimizer, 16384 // length, length)
            for updates in (1, BATCH):
                # Where sampler and trainer are not exact, several updates need a pass for the old log-probs.
                passes = BATCH * old if updates > 1 and precision != "fp8" else 0.0
                seconds = passes + BATCH * (forward + backward) + updates * step
                case = f"{length}, {updates} updates"
                bf16.setdefault((size, case), seconds)
                flops = model_flops(model.config, tokens, length)
                table.add(case, size, precision=precision, tok_per_s=tokens / seconds,
                          mfu=flops / seconds / BF16_PEAK, old_s=passes, forward_s=BATCH * forward,
                          backward_s=BATCH * backward, step_s=updates * step,
                          gib=torch.cuda.max_memory_allocated() / 2**30, x_bf16=bf16[size, case] / seconds)
        del model, optimizer


def transformers_seconds(recompute):
    """One step of the library as it comes: BF16, SDPA, fused AdamW; 8 sequences of 1024 tokens. (s, GiB)"""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = transformers_model().train()
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids, loss = torch.randint(151936, (8, 1024), device="cuda"), []
    parts = [lambda: loss.append(model(input_ids=ids, labels=ids, use_cache=False).loss),
             lambda: loss.pop().backward(),
             lambda: (torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step(),
                      optimizer.zero_grad(set_to_none=True))]
    return sum(timed(parts)), torch.cuda.max_memory_allocated() / 2**30


def transformers_rows(table):
    """The same work by transformers, in one run; recompute on both sides or on neither."""
    try:
        import transformers
    except ImportError:
        return note("transformers is not installed: no comparison with it")
    for recompute in (False, True):
        case = "8 x 1024" + ", recompute" * recompute
        theirs, peak = transformers_seconds(recompute)
        table.add(case, "1.7B", precision=f"transformers {transformers.__version__}",
                  tok_per_s=8192 / theirs, gib=peak)
        for precision in ("bf16", "fp8"):
            _, model, optimizer = trained_model("1.7B", precision)
            model.recompute = recompute
            seconds = sum(update_seconds(model, optimizer, 8, 1024)[1:])
            table.add(case, "1.7B", precision=precision, tok_per_s=8192 / seconds,
                      gib=torch.cuda.max_memory_allocated() / 2**30, x_transformers=theirs / seconds)
            del model, optimizer


def train_section(rows, quick):
    columns = "precision", "tok_per_s", "mfu", "old_s", "forward_s", "backward_s", "step_s", "gib", "x_bf16"
    table = Table("train", rows, *columns, "x_transformers", key="model")
    bf16 = {}
    for size in ["1.7B"] if quick else LAYERS:
        train_rows(table, size, [4096] if quick else [1024, 4096, 16384], bf16)
    transformers_rows(table)


def whole_step(size, precision, prompts, samples, length, **flags):
    """One GRPO step, rollout and update, as train.py runs it. -> seconds of both, peak in GiB"""
    before = torch.cuda.memory_allocated()
    cfg, model, optimizer = trained_model(size, precision, **flags)
    sampler, one = Sampler(model), torch.ones(1, device="cuda")
    needs = 1.1 * sum(list(train.memory(model.config, cfg, cfg.micro_tokens).values())[-2:])
    questions = [torch.randint(151936, (128,)).tolist() for _ in range(prompts)]

    def update(completions, micro_batches=None):
        pairs = [(questions[i // samples], tokens) for i, tokens in enumerate(completions)]
        for micro in itertools.islice(train.micro_batches(pairs, cfg.micro_tokens), micro_batches):
            loss_of(model, micro, one, prompts * samples * length).backward()
        optimizer.step(1e-6, 1.0)
        torch.cuda.synchronize()

    # First one token each, and one micro-batch: this compiles, captures and takes its memory.
    sampler.generate(questions, samples, length, stop=range(151936))
    update([[0] * length] * (prompts * samples), 1)
    train.hand_over(sampler, needs)
    t0 = time.perf_counter()
    out = sampler.generate(questions, samples, length, stop=[])
    train.hand_over(sampler, needs)
    t1 = time.perf_counter()
    update(out.tokens)
    return t1 - t0, time.perf_counter() - t1, (torch.cuda.max_memory_allocated() - before) / 2**30


def step_row(table, size, precision, prompts, samples, length, where="", bf16=None, **flags):
    rollout, update, peak = whole_step(size, precision, prompts, samples, length, **flags)
    table.add(f"{prompts * samples} x {length}{where}", size, precision=precision,
              tok_per_s=prompts * samples * length / (rollout + update), rollout_s=rollout, update_s=update,
              gib=peak, x_bf16=over(bf16, rollout + update))
    return rollout + update


def step_section(rows, quick):
    """At 4B and 8B in three precisions; then what fits into 80 GB."""
    columns = "precision", "tok_per_s", "rollout_s", "update_s", "gib", "x_bf16"
    table = Table("step", rows, *columns, key="model")
    sizes, bf16 = ["1.7B"] if quick else ["8B", "4B"], {}
    for precisions in ("bf16", "fp8"), ("fp8-rollout",):
        for size, precision in itertools.product(sizes, precisions):
            seconds = step_row(table, size, precision, 8, 8, 128 if quick else 4096, bf16=bf16.get(size))
            bf16.setdefault(size, seconds)
    if not quick:
        with only_80_gb():
            step_row(table, "4B", "fp8", 4, 4, 4096, ", 80 GB", recompute=True, micro_tokens=8192)


# ---- mismatch and rules: what lifting one rule of the numerics contract at a time does, and costs ----------

MISMATCH, MISMATCH_QUICK = (64, 2048), (4, 24)        # responses, tokens of each


class Relaunched:
    """Stands in for a kernel: runs it with some options of its own, whatever `launch` says."""

    def __init__(self, kernel, **options):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **options | self.options)


def relaunched(module, name, **options):
    """The change that puts a Relaunched in the place of a kernel."""
    return module, name, Relaunched(getattr(module, name), **options)


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
        for row in sorted(rows[before:], key=lambda row: -row["mean_dlogp"]):
            ranked[f"{row['case']} ({show(row['mean_dlogp'])})"] = middles, row["bins"]
        print(f"{model}, sources by mean |dlogp|:", *ranked, sep="\n  ")
        panels.append((model, "token of the response", "log", "symlog", ranked))
    if not quick:
        draw("mismatch.png", "mean |log p sampler - log p trainer|", panels)


def rules(rows, quick):
    """Log-probs of a packed batch and decode steps by our rules, and with one lifted: where x_lifted, its
    time over ours, is below 1, the rule costs something."""
    with mock.patch.dict(LAYERS, {"1.7B": 4}):
        model, one, ours = random_model("1.7B", "fp8", "bf16"), torch.ones(1, device="cuda"), {}
    packing, tokens = pack([4096] * 4, "cuda"), torch.randint(151936, (16384,), device="cuda")
    table = Table("rules", rows, "us", "x_lifted", key="model")
    for case, (precision, sampling, scoring) in mismatch_cases(model).items():
        if precision != "fp8":
            continue
        times = {}
        with changed(*sampling, *scoring), torch.no_grad():
            forward = lambda: token_logprobs(model(tokens, packing), model.head, tokens, one)
            times["forward 4 x 4096"] = measure([forward], graph=False)[0]
            sampler, width = Sampler(model), pages_for(16384 + 64)
            sampler._build(64, width, 64 * pages_for(4096 + 64) + 1)
            fill(sampler.pool)
            for B, context in [] if scoring else [(64, 1024), (64, 4096), (1, 16384)]:
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
    table, shares, cosines = Table("moves", rows, "lr", *MOVED, "least_cosine", key="model"), {}, {}
    for folder in folders or [""]:
        model = os.path.basename(os.path.normpath(folder or "default"))
        before, update, flags = len(rows), watch(table, model, train.Run.update), LEARN_FORMAT * bool(folder)
        with tempfile.TemporaryDirectory() as out, mock.patch.object(train.Run, "update", update):
            train.main([f"--model={folder}", f"--out={out}", *MOVES, *flags])
        updates = rows[before:]
        for name, what in MOVED.items():
            shares[f"{model}: {what}"] = range(len(updates)), [r[name] for r in updates]
        means = [sum(layer) / len(updates) for layer in zip(*(r["cosines"] for r in updates))]
        cosines[model] = range(len(means)), means
    if not quick:
        draw("policy_moves.png", "", [
            ("what an update changes", "update", "linear", "log", shares),
            ("cosine of the FP8 and the BF16 gradient", "layer", "linear", "linear", cosines)])


# ---- plot: curves of training runs -------------------------------------------------------------------------


def read_log(run):
    """The records of a run's log.jsonl; `run` is its folder or the file itself."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {path}: give the --out folder of a train.py run")
    records = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                records.append(json.loads(line))
            except ValueError:
                if line.endswith("\n"):          # a run that was killed, or goes on, may end in half a line
                    raise ValueError(f"{path}:{number} is not JSON: {line[:60]!r}")
    return records


def spread(logs, kind, key):
    """The seeds of one run -> step, mean, least and most (n,) each, of the steps that all of them have."""
    series = [{r["step"]: r[key] for r in log
               if r.get("kind") == kind and isinstance(r.get(key), (int, float))} for log in logs]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    values = [[s[step] for s in series] for step in steps]
    return steps, [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ImportError("the figure needs the package matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def with_zeros(axis):
    """A logarithmic y with a place for exact zeros."""
    axis.set_yscale("symlog", linthresh=1e-6)
    axis.set_ylim(bottom=-1e-7)


def plot(runs, path):
    """Curves of each run by step. Names that differ in a trailing -sN alone are seeds: mean and band."""
    if not runs:
        raise ValueError("plot needs run folders: python bench.py plot runs/NAME [runs/NAME ...]")
    logs = {}
    for run in runs:
        name = re.sub(r"(-s\d+)?(\.jsonl)?$", "", os.path.basename(os.path.normpath(run)), count=1)
        log = read_log(run)
        for r in log:
            r["clipped"] = r.get("clipped_low", 0) + r.get("clipped_high", 0)
        logs.setdefault(name, []).append(log)
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), constrained_layout=True, sharex=True)
    panels = [("reward", "mean reward (dots: held-out accuracy)"), ("length", "mean completion, tokens"),
              ("entropy", "mean of -log p, nats a token"),
              ("mean_dlogp", "mean |log p sampler - log p trainer|"),
              ("k3", "KL(sampler || trainer), k3 estimate"), ("clipped", "share of tokens beyond the clip")]
    for axis, (key, title) in zip(axes.flat, panels):
        for i, (name, seeds) in enumerate(logs.items()):
            steps, mean, least, most = spread(seeds, "step", key)
            axis.plot(steps, mean, color=f"C{i}", linewidth=1.3, label=f"{name} ({len(seeds)})")
            axis.fill_between(steps, least, most, color=f"C{i}", alpha=0.2, linewidth=0)
            if key == "reward":
                steps, mean, least, most = spread(seeds, "eval", "accuracy")
                axis.plot(steps, mean, "o", color=f"C{i}", markersize=5)
                axis.vlines(steps, least, most, color=f"C{i}", linewidth=1)
        if key in ("mean_dlogp", "k3"):
            with_zeros(axis)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend(fontsize=9)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}: {', '.join(f'{name} ({len(seeds)})' for name, seeds in logs.items())}")


def draw(name, label, panels):
    """assets/NAME with panels of curves: (title, label of x, scale of x, scale of y, {label: (x, y)})."""
    figure, axes = pyplot().subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False,
                                     constrained_layout=True)
    for axis, (title, x_label, x_scale, y_scale, curves) in zip(axes[0], panels):
        for curve, (x, y) in curves.items():
            axis.plot(x, y, label=curve, linewidth=1.3, color="k" if curve.startswith("exact") else None)
        axis.set(title=title, xlabel=x_label, xscale=x_scale, yscale=y_scale)
        if y_scale == "symlog":
            with_zeros(axis)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0, 0].set_ylabel(label)
    figure.savefig(os.path.join(HERE, "assets", name), dpi=130)
    print(f"wrote assets/{name}")


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
    args = parser.parse_args()
    out = args.out
    if out is None and not args.quick and "H200" in machine()["gpu"]:
        out = os.path.join(HERE, "assets", "bench_h200.json")
    if args.sections[0] == "plot":
        return plot(args.sections[1:], args.out or os.path.join(HERE, "assets", "runs.png"))
    names, folders = args.sections, []
    if names[0] in ("mismatch", "moves"):
        names, folders = names[:1], names[1:]
    for name in names:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, 1) or [", ".join(SECTIONS)]
            raise ValueError(f"unknown section '{name}': did you mean {near[0]}?")
    if out:
        read_results(out)               # a file of another GPU is refused now, not after the measurements
    return run_sections(names, folders, out, args.quick)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.exit(explain(error, "the load of this GPU, or add --quick"))
