"""
Everything that is claimed in numbers: exactness first, then the speed of each kernel beside a library's.

    python bench.py exact                       # sampler and trainer, bit by bit; exits with 1 if fp8 differs
    python bench.py gemm quant attention head   # kernels, random data, medians
    python bench.py plot runs/a runs/b          # curves of training -> assets/runs.png (needs matplotlib)

Each section prints a table; the last line on stdout is one JSON object, whose rows are merged into --out
(default assets/bench_h200.json, on an H200 alone). --quick runs fewer sizes and merges only where --out names
a file.

How to read a row: `us` is the median of one call, and `spread` the distance from the 10th to the 90th
percentile as a share of it. `of_limit` is the share of what the hardware allows: the larger of the time for
the operations (dense tensor peak) and for the bytes that have to move (copy rate, measured in the same run).
`x_name` is the time of that library over ours: above 1, ours is faster. Inputs rotate over more memory than
the L2 cache holds.
"""

import argparse
import contextlib
import difflib
import functools
import json
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8
import grpo
from model import (PAGE, Config, Transformer, attention, empty_cache, pack, paged_attention, sample,
                   token_logprobs)
from rollout import Parser, Sampler, explain
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
    return {"gpu": name, "torch": torch.__version__, "triton": triton, "command": command}


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


def measure(calls, graph=True, budget_s=0.15):
    """Microseconds of one call and their spread, over repeated runs through all of `calls`.

    The calls do the same work on different memory. They run back to back between two events, so that gaps of
    the host stay out: replayed from a CUDA graph, or, where autograd cannot be captured, launched ahead while
    the GPU sleeps.
    """
    torch.cuda.empty_cache()                     # the memory of earlier graphs
    calls = calls * -(-8 // len(calls))          # a short kernel alone would cost less than the events
    run = lambda: [call() for call in calls]
    for _ in range(2):                           # the first run compiles, the second takes its memory
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin           # seconds, host included
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            kept = run()                         # alive, or the allocator would give all calls one output
        run = recorded.replay
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(min(max(int(budget_s / once), 7), 50)):
        torch.cuda._sleep(200_000 if graph else int(2e9 * once))     # in clocks, of at most 2 GHz
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    times.sort()
    median, n = times[len(times) // 2], len(times) - 1
    return median, (times[round(0.9 * n)] - times[round(0.1 * n)]) / median


def attempt(library, *args, **options):
    """The median of measure(), or None where a library refuses: an empty column, and the reason printed."""
    try:
        return measure(*args, **options)[0]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        note(f"note: {library} is not measured everywhere: {str(error).strip().splitlines()[0][:150]}")
        return None


note = functools.cache(print)                    # each message once


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
    """Bytes a second of a large device copy, read and written both counted: the ceiling of this very card."""
    source = [torch.randn(2**27, device="cuda") for _ in range(2)]           # 0.5 GiB each
    target = torch.empty_like(source[0])
    rate = 2 * target.nbytes / (measure([lambda x=x: target.copy_(x) for x in source])[0] * 1e-6)
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
EXACT_QUICK = [(1, 3, 20, 70), (7, 12, 80, 70)]


def exact_model(name, precision, kv, device, seed):
    """Weights that are not Gaussian: a quarter of the 128x128 blocks is scaled by 2^-12 .. 2^8, some are 0.

    Each band of 128 output rows is then brought to a size of its own, within 2^6: no band drowns the others.
    """
    family, hidden, width, H, G, D, tied = EXACT_MODELS[name]
    config = Config(vocab_size=2000, hidden_size=hidden, intermediate_size=width, num_hidden_layers=2,
                    num_attention_heads=H, num_key_value_heads=G, head_dim=D, max_position_embeddings=5120,
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
        for a, b in zip(sum(mine, ()), sum(theirs, ())):                         # (count, G, PAGE, ...)
            a, b = (x.reshape(*b.shape[:3], -1).view(torch.uint8) for x in (a[:count], b))
            differs = (a != b).any(3) & used
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
    # Scarce pages: 14 a slot, so that some sequences are preempted and prefilled again.
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
    """All models in fp8 at all batch sizes, the last also with FP8 KV; then one in the other precisions, for
    contrast."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("exact", rows, "precision", "kv", "tokens", "differing", "pages", "pages_differing",
                  "mean_dlogp", "max_dlogp", "longest", "preemptions", "seconds", key="model")
    batches, models = (EXACT_QUICK, list(EXACT_MODELS)[:2]) if quick else (EXACT_BATCHES, list(EXACT_MODELS))
    runs = [(name, "fp8", "bf16", batches) for name in models] + [(models[-1], "fp8", "fp8", batches)]
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


def fprop_calls(M, N, K):
    """One set of operands -> {who: call}, all on the same values."""
    x, w = randn(M, K), randn(N, K)
    (xc, xs), (wc, ws) = fp8.quantize_rows(x), fp8.quantize_blocks(w)
    return {"ours": lambda: fp8.fprop(xc, xs, wc, ws), "bf16": lambda: torch.mm(x, w.t()),
            "cublaslt": cublaslt(xc, xs, wc, ws, True)}


def dgrad_calls(M, N, K):
    dy, w = randn(M, N), randn(N, K)
    (dc, ds), (wc, ws) = fp8.quantize_rows(dy), fp8.quantize_blocks(w)
    wt, wts = fp8.transpose_codes(wc), ws.t()
    return {"ours": lambda: fp8.fprop(dc, ds, wt, wts), "bf16": lambda: torch.mm(dy, w),
            "cublaslt": cublaslt(dc, ds, wt, wts, True)}


def wgrad_calls(M, N, K):
    """Ours adds to an FP32 gradient (8 bytes an element move), the libraries write BF16 (2 bytes)."""
    dy, x = randn(M, N), randn(M, K)
    (dc, ds), (xc, xs), out = fp8.quantize_cols(dy), fp8.quantize_cols(x), torch.zeros(N, K, device="cuda")
    return {"ours": lambda: (fp8.wgrad(dc, ds, xc, xs, out), out)[1], "bf16": lambda: torch.mm(dy.t(), x),
            "cublaslt": cublaslt(dc, ds, xc, xs, False)}


def gemm_row(table, case, where, make, M, N, K):
    """Time one product at one shape. Decode mostly reads weights: enough sets of them to leave the cache."""
    small = case == "decode"
    sets = [make(M, N, K) for _ in range(max(2, math.ceil(COLD / (N * K))) if small else 2)]
    first = sets[0]
    # E4M3 keeps 3 bits after the leading one: about 2.6 % on an operand, 3.7 % on a product of random values.
    check_close(f"{case} {where}", first["ours"](), first["bf16"](), 0.05)
    ours, spread = measure([s["ours"] for s in sets])
    bf16 = measure([s["bf16"] for s in sets])[0]
    lt = None
    if not small and first["cublaslt"]:       # cuBLASLt is no baseline for a few rows: far behind BF16 there
        lt = attempt("cuBLASLt", [s["cublaslt"] for s in sets])
    flops = 2 * M * N * K
    # All three matrices once at a byte an element, and what the result has more: FP32 in and out, or BF16.
    bytes_moved = M * (N + K) + N * K + {"wgrad": 7 * N * K, "dgrad": M * K}.get(case, M * N)
    table.add(case, where, us=ours, tflops=flops / ours / 1e6, tb_per_s=bytes_moved / ours / 1e6,
              of_limit=limit_us(bytes_moved, flops, FP8_PEAK) / ours, x_bf16=bf16 / ours,
              x_cublaslt=over(lt, ours), bf16_us=bf16, cublaslt_us=lt, spread=spread)


def gemm(rows, quick):
    copy_rate()
    table = Table("gemm", rows, "us", "tflops", "tb_per_s", "of_limit", "x_bf16", "x_cublaslt", "spread")
    makers = {"fprop": fprop_calls, "dgrad": dgrad_calls, "wgrad": wgrad_calls}
    for size in ["8B"] if quick else QWEN3:
        for layer, (N, K) in layer_shapes(size).items():
            for case, make in makers.items():
                gemm_row(table, case, f"{size} {layer} M8192 N{N} K{K}", make, 8192, N, K)
            for M in (16, 64, 256):
                gemm_row(table, "decode", f"{size} {layer} M{M} N{N} K{K}", fprop_calls, M, N, K)


# ---- quant: kernels that only move bytes -------------------------------------------------------------------


def quant_cases(M, C, width):
    """{case: (shape, bytes moved, maker of a call on fresh memory)}; a scale is 4 bytes for 128 values."""
    w, scale = fp8.Weight((C,), device="cuda"), 4 / 128
    w.write(torch.rand(C) + 0.5)
    rstd = torch.rand(M, device="cuda") + 0.5
    on = lambda f, *shapes: lambda: functools.partial(f, *(randn(*s) for s in shapes))

    def adamw():
        weight = fp8.Weight((2 * width, C), device="cuda", keep="codes")
        weight.write(torch.randn(2 * width, C, device="cuda"))
        optimizer = fp8.AdamW({"w": weight}, (0.9, 0.95), 1e-8, 0.1, lambda name: True)
        weight.grad.normal_()
        return lambda: optimizer.step(1e-4, 1.0)

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
        "norm backward": (x, 8.5, on(lambda dy, dh, h: fp8.norm_backward(dy, dh, h, rstd, w), x, x, x)),
        "norm to columns": (x, 3 + scale, on(lambda h: fp8.norm_operand(h, rstd, w, 1e-6, True), x)),
        "swiglu+quantize": (mlp, 5 + scale, on(lambda g: fp8.swiglu_forward(g, True), (M, 2 * width))),
        # read dY, gate and up, write their gradients and the columns of the product
        "swiglu backward": (mlp, 11 + scale,
                            on(lambda dy, g: fp8.swiglu_backward(dy, g, True), mlp, (M, 2 * width))),
        # gradient: read for its norm and the update, then zeroed; master and moments read and written; codes
        "adamw step": (matrix, 37, adamw),
    }


def quant(rows, quick):
    copy_rate()
    table = Table("quant", rows, "us", "tb_per_s", "of_limit", "spread")
    for size in ["8B"] if quick else ["1.7B", "8B"]:
        C, _, width = QWEN3[size]
        for case, (shape, per_element, make) in quant_cases(8192, C, width).items():
            bytes_moved = math.prod(shape) * per_element
            us, spread = measure([make() for _ in range(max(1, min(4, math.ceil(2 * COLD / bytes_moved))))])
            table.add(case, f"{size} {shape[0]} x {shape[1]}", us=us, tb_per_s=bytes_moved / us / 1e6,
                      of_limit=limit_us(bytes_moved) / us, spread=spread)


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
    ours, flash = attention(q, k, v, packing), sdpa(*batched, SDPBackend.FLASH_ATTENTION)
    gradient = lambda o, inputs: torch.autograd.grad(o, inputs, do.view(o.shape), retain_graph=True)
    check_close(f"attention {where}", ours, flash.reshape(T, H, D), 0.02)
    for mine, theirs in zip(gradient(ours, (q, k, v)), gradient(flash, batched)):
        check_close(f"attention backward {where}", mine, theirs.reshape(mine.shape), 0.02)

    with torch.no_grad():
        forward, spread = measure([lambda: attention(q, k, v, packing)])
        theirs = attempt("flash attention", [lambda: sdpa(*batched, SDPBackend.FLASH_ATTENTION)])
        cudnn = attempt("cuDNN attention", [lambda: sdpa(*batched, SDPBackend.CUDNN_ATTENTION)])
    flops = 2 * T * S * H * D                # two products of T x S/2 scores: the causal half
    table.add("forward", where, us=forward, tflops=flops / forward / 1e6,
              of_limit=flops / BF16_PEAK * 1e6 / forward, x_sdpa=over(theirs, forward),
              x_cudnn=over(cudnn, forward), spread=spread)

    backward, spread = measure([lambda: gradient(ours, (q, k, v))], graph=False)
    theirs = attempt("flash attention, backward", [lambda: gradient(flash, batched)], graph=False)
    with deterministic():
        ordered = attempt("deterministic flash attention", [lambda: gradient(flash, batched)], graph=False)
    table.add("backward", where, us=backward, tflops=2.5 * flops / backward / 1e6,
              of_limit=2.5 * flops / BF16_PEAK * 1e6 / backward, x_sdpa=over(theirs, backward),
              x_sdpa_deterministic=over(ordered, backward), spread=spread)


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
    with torch.no_grad():
        us, spread = measure([ours])
        theirs = measure([lambda: chunked_cross_entropy(hidden, w, targets, False)])[0]
    table.add("forward", where, us=us, tflops=flops / us / 1e6, of_limit=flops / BF16_PEAK * 1e6 / us,
              x_torch=theirs / us, spread=spread)
    # Ours forms the logits twice, theirs once: the operations counted are the three products that are needed.
    us, spread = measure([lambda: torch.autograd.grad(ours(), hidden, grad)], graph=False)
    theirs = measure([lambda: chunked_cross_entropy(hidden, w, targets, True)], graph=False)[0]
    table.add("forward+backward", where, us=us, tflops=3 * flops / us / 1e6,
              of_limit=3 * flops / BF16_PEAK * 1e6 / us, x_torch=theirs / us, spread=spread)
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


def plot(runs, path):
    """Reward (dots: held-out accuracy), |dlogp|, length and rollout speed of each run by step."""
    if not runs:
        raise ValueError("plot needs run folders: python bench.py plot runs/NAME [runs/NAME ...]")
    logs = {os.path.basename(os.path.normpath(run)): read_log(run) for run in runs}
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plot needs the package matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    steps = {name: [r for r in log if r.get("kind") == "step"] for name, log in logs.items()}
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True, sharex=True)
    panels = [("reward", "mean reward (dots: held-out accuracy)"), ("length", "mean completion, tokens"),
              ("mean_dlogp", "mean |log p sampler - log p trainer|"),
              ("rollout_tok_per_s", "rollout, tokens/s")]
    for axis, (key, title) in zip(axes.flat, panels):
        for i, (name, log) in enumerate(steps.items()):
            points = [(r["step"], r[key]) for r in log if isinstance(r.get(key), (int, float))]
            if key == "mean_dlogp":
                axis.set_yscale("symlog", linthresh=1e-6)  # logarithmic, with a place for exact zeros
                axis.set_ylim(bottom=-1e-7)
            axis.plot(*zip(*points) if points else ([], []), color=f"C{i}", linewidth=1.3, label=name)
            if key == "reward":
                evals = [(r["step"], r["accuracy"]) for r in logs[name] if r.get("kind") == "eval"]
                axis.plot(*zip(*evals) if evals else ([], []), "o", color=f"C{i}", markersize=5)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    axes[0, 0].legend(fontsize=9)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}: {', '.join(f'{name} ({len(log)} steps)' for name, log in steps.items())}")


# ---- the command line --------------------------------------------------------------------------------------

SECTIONS = {"exact": exact, "gemm": gemm, "quant": quant, "attention": attention_section, "head": head}


def run_sections(names, out, quick):
    """Runs the sections in turn, merging after each, also after one that failed; -> exit code."""
    cuda, rows = torch.cuda.is_available(), []
    print(" | ".join(f"{k} {v}" for k, v in machine().items()))
    for name in names:
        if not cuda and not (name == "exact" and quick):
            print(f"{name}: needs a CUDA device, and torch sees none"
                  + (" (--quick runs a tiny version on the CPU)" if name == "exact" else ""))
            continue
        torch.manual_seed(0)
        try:
            SECTIONS[name](rows, quick)
        finally:
            if out:
                merge(out, rows)
    print(json.dumps(machine() | {"rows": rows}))
    return int(any(r["differing"] + r["pages_differing"] for r in rows
                   if r["section"] == "exact" and r["precision"] == "fp8"))


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", help=f"{', '.join(SECTIONS)}; or plot and run folders")
    parser.add_argument("--out", help="JSON file to merge into; for plot, the picture [assets/runs.png]")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args()
    out = args.out
    if out is None and not args.quick and "H200" in machine()["gpu"]:
        out = os.path.join(HERE, "assets", "bench_h200.json")
    if args.sections[0] == "plot":
        return plot(args.sections[1:], args.out or os.path.join(HERE, "assets", "runs.png"))
    for name in args.sections:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, 1) or [", ".join(SECTIONS)]
            raise ValueError(f"unknown section '{name}': did you mean {near[0]}?")
    if out:
        read_results(out)               # a file of another GPU is refused now, not after the measurements
    return run_sections(args.sections, out, args.quick)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        sys.exit(explain(error, "the load of this GPU, or add --quick"))
