"""
What the program promises, as tests. In reading order:

    1  references and quantizers       6  the sampler
    2  kernels against references      7  training: runs, resume, checkpoints, ranks
    3  exactness: one set of bits      8  the benchmarks
    4  model, checkpoints, tokenizer   9  the commands of the README
    5  tasks, reward, loss

    python -m pytest -q  # everything that this machine can show
    TRITON_INTERPRET=1 python -m pytest -q -k kernel  # what test_interpreted starts where there is no GPU

Tests named test_kernel_* run the Triton kernels: on a GPU, or interpreted on a CPU in a process of their own,
where there is no GPU; many run on the references as well. Without a GPU all kernels are also compiled for
Hopper and their binaries inspected. Nothing is downloaded: models are random and tiny.
Comparisons with transformers and tokenizers skip where those are not installed.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import bench  # noqa: E402
import fp8  # noqa: E402
import grpo  # noqa: E402
import model  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from fp8 import Weight  # noqa: E402
from model import PAGE, Config, Tokenizer, Transformer, token_logprobs  # noqa: E402
from rollout import Sampler  # noqa: E402

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it does
BF16, FP32 = torch.bfloat16, torch.float32
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # for processes that run beside the tests
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
needs_kernels = pytest.mark.skipif(not (CUDA or fp8.INTERPRET), reason="needs a GPU or TRITON_INTERPRET=1")
cpu_only = pytest.mark.skipif(CUDA, reason="slow, and the same without a GPU: shown there")


def by_mode(plain, interpreted, gpu):
    """Cases for references on a CPU, for interpreted kernels (slow, FP32 only), and for a GPU."""
    return gpu if CUDA else interpreted if fp8.INTERPRET else plain


# Relative error against FP64: a few roundings of 2^-24 or 2^-9 in a row.
LIMIT = {FP32: 3e-6, BF16: 1.2e-2}
DTYPES = by_mode([FP32, BF16], [FP32], [BF16])  # the interpreter multiplies BF16 as integers
FUZZ = int(os.environ.get("FUZZ", by_mode(0, 3, 48)))  # cases of each test that draws its own


def same(a, b, what=""):
    """Equal to the bit (NaN equals NaN); the message counts the differences and shows the first."""
    a, b = a.detach().cpu(), b.detach().cpu()
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
    differ = (bits(a) != bits(b)) & ~(a.float().isnan() & b.float().isnan())
    if differ.any():
        i = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(differ.sum())} of {a.numel()} differ, at {i}: {a[i]}, {b[i]}")


def bits(x):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def relative(a, b):
    """Size of the error of a over the size of b."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def weight(*shape, keep="data", scale=1.0, dtype=BF16, device="cpu"):
    w = Weight(shape, dtype, device, keep)
    w.write((torch.randn(shape) * scale).to(device))
    return w


SIZES = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-6,
             rope_theta=1e6, tie_word_embeddings=False)


def tiny_config(**changes):
    return Config(**{**SIZES, "tie_word_embeddings": True, "eos_token_id": [7], **changes})


def big_config(size):
    return tiny_config(**bench.config_fields(size))


@contextlib.contextmanager
def refused(*words):
    """One line or two, all of the words among them."""
    with pytest.raises((ValueError, OSError)) as error:
        yield
    message = str(error.value)
    assert all(word in message for word in words) and message.count("\n") < 2, message


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


# ============================================================================================================
# 1  References and quantizers
# ============================================================================================================


def dequantize_rows(codes, scales):
    """Exact, so in FP64."""
    return codes.double() * scales.t().double().repeat_interleave(128, 1)[:, :codes.shape[1]]


@pytest.mark.parametrize("shape", [(1, 128), (7, 576), (128, 64), (33, 100), (129, 192), (300, 1), (5, 3)])
def test_quantizers_definition(shape):
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    M, K = shape
    codes, scales = fp8.quantize_rows(x)
    assert codes.shape == (M, K) and scales.shape == (-(-K // 128), M)
    assert codes.stride(0) % 16 == 0 and scales.stride(0) % 4 == 0
    for m in (0, M - 1):
        for j in range(scales.shape[0]):
            part = x[m, j * 128:(j + 1) * 128]
            assert scales[j, m] == part.abs().max() / 448
            same(codes[m, j * 128:(j + 1) * 128], (part * (1 / scales[j, m])).to(fp8.E4M3))
    assert relative(dequantize_rows(codes, scales), x) < 0.04
    (codes2, scales2), (codes_t, scales_t) = fp8.quantize_rows_cols(x)
    same(codes2, codes), same(scales2, scales)
    Mp = -(-M // 128) * 128
    assert codes_t.shape == (K, Mp) and scales_t.shape == (Mp // 128, K)
    assert (bits(codes_t[:, M:]) == 0).all(), "padding tokens must be exact zeros"
    assert relative(dequantize_rows(codes_t, scales_t)[:, :M], x.t()) < 0.04
    blocks, block_scales = fp8.quantize_blocks(x)
    assert block_scales.shape == (-(-M // 128), -(-K // 128))
    assert block_scales[0, 0] == x[:128, :128].abs().max() / 448
    assert relative(fp8.dequantize_blocks(blocks, block_scales), x) < 0.04
    same(fp8.transpose_codes(blocks), blocks.t())
    turned, turned_scales = fp8.quantize_blocks_t(x, scales)
    assert turned.shape == (K, Mp) and turned_scales.shape == (-(-K // 128), Mp // 128)
    assert (bits(turned[:, M:]) == 0).all(), "padding tokens must be exact zeros"
    same(turned_scales, block_scales.t()), same(turned[:, :M], blocks.t())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_reach_the_scale(bad):
    x = torch.randn(130, 300)
    x[129, 299] = bad
    assert not fp8.quantize_rows(x)[1][2, 129].isfinite() and not fp8.quantize_cols(x)[1][1, 299].isfinite()
    assert not fp8.quantize_blocks(x)[1][1, 2].isfinite()
    assert not fp8.quantize_blocks_t(x, fp8.quantize_rows(x)[1])[1][2, 1].isfinite()
    assert not fp8.linear(x, weight(64, 300, keep="codes"))[129].isfinite().any()


def test_any_amax_gives_448():
    """A million FP32 numbers of any size: none is NaN by a rounding above 448; below the floor they fade."""
    amax = torch.randint(0, 0x7F800000, (1_000_000,), dtype=torch.int32).view(FP32)
    amax[:3] = torch.tensor([0.0, 1e-12, 3.4e38])
    codes, scales = fp8.encode_reference(torch.stack((amax, -amax), 1), 1)
    codes, above = codes.float(), amax >= 1e-12
    assert (codes[above] == torch.tensor([448.0, -448.0])).all() and codes.abs().max() <= 448
    assert scales.isfinite().all() and (scales >= fp8.AMAX_FLOOR / 448).all()


@pytest.mark.parametrize("M", [0, 1, 127, 129, 641])
def test_gradients_against_fp64(M):
    """All three products within the quantization error; sizes differ by orders between blocks and tokens."""
    torch.manual_seed(M)
    N, K = 192, 576
    step = lambda n: 10.0 ** (torch.arange(n) // 128)
    x = (torch.randn(M, K) * step(K)).requires_grad_()
    w, b = weight(N, K, keep="codes", dtype=FP32), weight(N, dtype=FP32)
    w.write(torch.randn(N, K) / step(K) * step(N)[:, None] ** 3)
    y = fp8.linear(x, w, b)
    dy = torch.randn(M, N) * 10.0 ** (4 * torch.rand(M, 1) - 4) / step(N) ** 3
    y.backward(dy)
    assert y.shape == (M, N)
    x64, w64, dy64 = x.detach().double(), w.full().double(), dy.double()
    if M == 0:
        assert (w.grad == 0).all() and x.grad.shape == (0, K)
        return
    # Each block on its own: a scale taken from its neighbour would be off by 10 or more.
    for j in range(0, N, 128):
        block = slice(j, j + 128)
        assert relative(y[:, block], x64 @ w64[block].t() + b.full().double()[block]) < 0.04
    for j in range(0, K, 128):
        block = slice(j, j + 128)
        assert relative(x.grad[:, block], dy64 @ w64[:, block]) < 0.04
        for i in range(0, N, 128):
            rows = slice(i, i + 128)
            assert relative(w.grad[rows, block], dy64[:, rows].t() @ x64[:, block]) < 0.06
    assert relative(b.grad, dy64.sum(0)) < 1e-5


def test_one_rounding_in_blocks_is_closer_than_two_in_groups():
    """WGrad's X^T in 128x128 blocks of BF16 values, against groups of 128 tokens: of the same values, and, as
    in Jet-RL, of what a row-wise quantization has left of them. Features differ in size by 100, one value is
    an outlier."""
    dy = torch.randn(1024, 256).bfloat16()
    x = (torch.randn(1024, 256) * 10 ** (2 * torch.rand(256))).bfloat16()
    x[0, 0] = 1e4
    left = dequantize_rows(*fp8.quantize_cols(dy))
    codes, scales = fp8.quantize_rows(x)
    error = lambda xt: relative((left @ xt.double().t())[:, 1:], (dy.double().t() @ x.double())[:, 1:])
    blocks = error(fp8.dequantize_blocks(*fp8.quantize_blocks_t(x, scales)))
    once = error(dequantize_rows(*fp8.quantize_cols(x)))
    twice = error(dequantize_rows(*fp8.quantize_cols(dequantize_rows(codes, scales))))
    assert blocks < 1.05 * once and 1.1 * blocks < twice


@pytest.mark.parametrize("use_fp8", [True] + by_mode([False], [], [False]))
def test_kernel_fused_layers_against_autograd(use_fp8):
    """norm_linear, swiglu_linear and norm against autograd on the formula in FP64; the same bits twice."""
    (T, C, F), results = by_mode((70, 192, 320), (70, 128, 72), (70, 192, 320)), []
    on = dict(dtype=by_mode(FP32, BF16, BF16), device=DEVICE)
    limit = 0.08 if use_fp8 else by_mode(1e-5, None, 0.02)

    def rmsnorm(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w

    for _ in range(by_mode(2, 1, 2)):
        torch.manual_seed(0)
        keep = "codes" if use_fp8 else "data"
        up, down = (weight(*s, keep=keep, scale=s[1] ** -0.5, **on) for s in ((2 * F, C), (C, F)))
        norms, bias = [weight(C, **on) for _ in range(2)], weight(2 * F, **on)
        leaves = [torch.randn(T, C).to(**on).requires_grad_() for _ in range(2)]
        probe = torch.randn(2, T, C).to(**on)
        h, y = fp8.norm_linear(*leaves, norms[0], 1e-6, up, bias, fp8=use_fp8)
        h, y = fp8.norm(h, fp8.swiglu_linear(y, down, fp8=use_fp8), norms[1], 1e-6)
        torch.autograd.backward((h, y), tuple(probe))
        results.append([h, y] + [x.grad for x in leaves + [up, down, *norms, bias]])

    exact = [x.detach().double().requires_grad_() for x in leaves]
    params = [w.full().double().requires_grad_() for w in (up, down, *norms, bias)]
    h64 = exact[0] + exact[1]
    gate, value = (rmsnorm(h64, params[2]) @ params[0].t() + params[4]).chunk(2, -1)
    h64 = h64 + (torch.nn.functional.silu(gate) * value) @ params[1].t()
    y64 = rmsnorm(h64, params[3])
    torch.autograd.backward((h64, y64), tuple(probe.double()))
    for mine, again, other in zip(results[0], results[-1], [h64, y64] + [x.grad for x in exact + params]):
        same(mine, again, "a second time")
        assert relative(mine, other) < limit


def adamw(weights, decay=0.1, states=FP32):
    return fp8.AdamW(weights, (0.9, 0.95), 1e-8, decay, lambda name: name == "w", states)


def make_optimizer(keep="codes", decay=0.1, states=FP32, shape=(192, 300), device="cpu"):
    torch.manual_seed(0)
    weights = {"w": Weight(shape, device=device, keep=keep), "b": Weight((77,), device=device)}
    pairs = [(name, torch.randn(w.shape).to(device)) for name, w in weights.items()]
    optimizer = adamw(weights, decay, states)
    optimizer.load(pairs)
    return weights, optimizer, dict(pairs)


@pytest.mark.parametrize("keep", ["codes", "data", "both"])
def test_adamw_against_torch(keep):
    weights, mine, start = make_optimizer(keep)
    params = {name: torch.nn.Parameter(x.clone()) for name, x in start.items()}
    other = torch.optim.AdamW([{"params": [params["w"]], "weight_decay": 0.1},
                               {"params": [params["b"]], "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        for group in other.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for name, w in weights.items():
            g = torch.randn(w.shape) * 10
            w.add_grad(g)
            params[name].grad = g.clone()
        expected = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        other.step()
        norm, finite = mine.step(0.01 / (step + 1), 1.0)
        assert finite and relative(norm, expected) < 1e-6
        assert all((w.grad == 0).all() for w in weights.values())
        for name, p in params.items():
            assert relative(mine.master[name], p) < 1e-6
        fresh = Weight((192, 300), keep=keep)
        fresh.write(mine.master["w"])
        for a, b in zip(weights["w"].buffers(), fresh.buffers()):
            same(a, b)


def test_noise_is_philox():
    """The first of the known answers that its authors publish."""
    words = fp8.philox_reference(0, *torch.zeros(4, dtype=torch.int64))
    assert [hex(int(word)) for word in words] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_stochastic_rounding_has_no_bias():
    """Over all 65,536 noises the mean of a number's roundings is that number, to the last bit."""
    noise = torch.arange(2 ** 16) | 0x5A5A0000  # the high bits must not matter
    for x in (1.0, 1.00390625, 3.14159, -0.001234, 1e-30, -3e38, 0.0, 1e-40):
        rounded = fp8.round_reference(torch.full((2 ** 16,), x), noise).double()
        assert rounded.mean().item() == torch.tensor(x).double().item()
        assert len(rounded.unique()) == (1 if torch.tensor(x).bfloat16() == torch.tensor(x) else 2)
    for x in (math.inf, -math.inf, math.nan):
        same(fp8.round_reference(torch.full((2 ** 16,), x), noise), torch.full((2 ** 16,), x, dtype=BF16))
    # A NaN of all ones plus noise would wrap around to zero.
    nans = torch.tensor([-1, 2 ** 31 - 1], dtype=torch.int32).view(FP32)
    assert fp8.round_reference(nans, noise[:2]).isnan().all()


@pytest.mark.parametrize("keep", ["codes", "data", "both"])
def test_adamw_in_bf16_follows_fp32(keep):
    """Steps of 1/50 of the distance between BF16 numbers: on average masters move as in FP32, where rounding
    to nearest would hold them."""
    runs = []
    for states in (FP32, BF16):
        weights, optimizer, start = make_optimizer(keep, decay=0.0, states=states)
        optimizer.load([(name, torch.rand(x.shape) + 1) for name, x in start.items()])  # steps of BF16: 1/128
        for _ in range(40):
            for w in weights.values():
                w.add_grad(torch.ones(w.shape) + torch.randn(w.shape))
            optimizer.step(1 / 128 / 50, 1e9)
        runs.append(optimizer.state())
    exact, mine = runs
    for name in ("m.w", "v.w"):
        assert mine[name].dtype == BF16 and relative(mine[name], exact[name]) < 0.02
        assert abs((mine[name].double().mean() / exact[name].double().mean()).item() - 1) < 2e-3
    moved = [x["master.w"].double().mean() - 1.5 for x in (mine, exact)]
    assert abs(moved[0] - moved[1]) < 3 * (1 / 128) * (40 / 12 / 57600) ** 0.5 + 1e-5, moved
    if weights["w"].data is not None:
        same(weights["w"].data, mine["master.w"])
    else:
        same(weights["w"].codes, fp8.quantize_blocks(mine["master.w"])[0])
    other = make_optimizer(keep)[1]
    other.load_state(mine)  # FP32 states from BF16 ones: the same values
    same(other.master["w"], mine["master.w"].float())


# ============================================================================================================
# 2  Kernels against references
# ============================================================================================================


def cast_as_torch(x, source, target, rounding):
    """A cast for the interpreter, whose own rounds halves up and truncates to BF16; hardware does not."""
    kinds = {"fp64": torch.float64, "fp32": FP32, "fp16": torch.float16, "bf16": BF16,
             "fp8e4nv": fp8.E4M3}
    y = torch.from_numpy(np.ascontiguousarray(x).reshape(-1)).view(kinds[str(source)]).to(kinds[str(target)])
    return bits(y).numpy().view(f"u{y.element_size()}").reshape(x.shape)


if fp8.INTERPRET:
    import triton.runtime.interpreter as interpreter
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        """Triton 3.6 turns a loop bound to int in a way that NumPy 2.4 refuses; later ones do not."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._convert_float, interpreter._patch_lang_tensor = cast_as_torch, patch_index

def both(x):
    return x.to(DEVICE), x.cpu()


@needs_kernels
def test_kernel_casts_round_like_torch():
    """All E4M3 codes, their midpoints and the floats next to those, subnormals included."""
    values = torch.arange(127, dtype=torch.uint8).view(fp8.E4M3).float()
    middle = (values[1:] + values[:-1]) / 2
    points, far = torch.cat((values, middle)), torch.tensor(1e9)
    x = torch.cat((points, points.nextafter(far), points.nextafter(-far)))
    x = torch.cat((x, -x)).clamp(-448, 448)
    x = torch.nn.functional.pad(x[:, None], (0, 1), value=448.0)  # amax 448: the scale is exactly 1
    device, host = both(x)
    for mine, other in zip(fp8.quantize_rows(device), fp8.quantize_rows_reference(host)):
        same(mine, other)


def wild(rows, cols, height):
    """FP32 (rows, cols): blocks of height x 128 have scales over 2^-20 .. 2^20, one in eight is zero."""
    blocks = -(-rows // height), -(-cols // 128)
    factor = 2.0 ** torch.randint(-20, 21, blocks) * (torch.rand(blocks) > 1 / 8)
    factor = factor.repeat_interleave(height, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return torch.randn(rows, cols, device=DEVICE) * factor.to(DEVICE)


def cut(pair, rows, cols=0):
    """(codes, scales) of 1x128 groups without the first rows, and columns: a view into the larger tensors."""
    return pair[0][rows:, cols:], pair[1][cols // 128:, rows:]


def close_to_fp64(mine, x, w, start, what):
    """mine = start + x w^T within the tensor core's short sums and a BF16 rounding; x, w: FP64 values."""
    limit = 2.0 ** -10 * (x.abs() @ w.abs().t()) + 2.0 ** -22 * abs(start)
    want = start + x @ w.t()
    if mine.dtype == BF16:
        limit += 2.0 ** -8 * want.abs()
    wrong = ~((mine.double() - want).abs() <= limit)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} are too far from FP64"


@needs_kernels
def test_kernel_products_fuzz():
    """FUZZ random shapes, scales and views: any tile and number of rows gives the same bits, close to FP64.
    Weights of a new shape are compiled: few shapes, and any M."""
    rng, (most, top) = random.Random(0), (1500, 3000) if CUDA else (150, 400)
    tiles = [(16, 64, True, 4, 3), (128, 128, False, 8, 3)]
    weights = [(200, 23 * 128, 0, 128, 0)]  # a view of scales that does not lie on 16 bytes, as TMA wants it
    weights += [(rng.randint(1, most), rng.randint(1, top), rng.choice((0, 128)), rng.choice((0, 128)), i % 2)
                for i in range(2 + FUZZ // 500)]
    if CUDA:
        tiles += [(32, 64, True, 4, 8), (64, 64, True, 4, 8)]
        weights += [(20_000, 80, 0, 0, 1), (1000, 12_288, 0, 0, 1)]  # many tiles of one block, many blocks
    hopper = [fp8.HOPPER] * bool(CUDA and fp8.multiprocessors(DEVICE))
    tiles += [*hopper, *(hopper and fp8.DECODE_TILES)]

    def product(x, w, bias, tiles, x64, w64, what):
        mine = fp8.fprop(*x, *w, bias)
        for tile in tiles:
            same(mine, fp8.fprop(*x, *w, bias, tile=tile), f"{what}, tile {tile}")
        m = rng.randint(1, len(mine))
        same(mine[:m], fp8.fprop(x[0][:m], x[1][:, :m], *w, bias), f"{what}, its first {m} rows")
        close_to_fp64(mine, x64, w64, 0.0 if bias is None else bias.double(), what)

    for case in range(FUZZ):
        torch.manual_seed(case)
        N, K, skip_n, skip_k, biased = rng.choice(weights)
        M = min(most, rng.choice([1, 16, 65, 128, 129, 257, rng.randint(1, most)]))
        skip_x = rng.choice((0, 4, 128))
        what = f"case {case}: M={M} N={N} K={K} skipping {skip_x} rows of X, {skip_n} x {skip_k} of W"
        x = cut(fp8.quantize_rows(wild(M + skip_x, K, 1)), skip_x)
        codes, scales = fp8.quantize_blocks(wild(N + skip_n, K + skip_k, 128))
        w = codes[skip_n:, skip_k:], scales[skip_n // 128:, skip_k // 128:]
        w64 = fp8.dequantize_blocks(*w).double()
        bias = torch.randn(N, device=DEVICE).bfloat16() if biased else None
        product(x, w, bias, tiles, dequantize_rows(*x), w64, what)
        dy = fp8.quantize_rows(wild(M, N, 1))
        turned = fp8.transpose_codes(w[0]), w[1].t()
        product(dy, turned, None, tiles[:1] + hopper, dequantize_rows(*dy), w64.t(), "dX, " + what)

        dyt = cut(fp8.quantize_cols(wild(N + skip_n, M + skip_x, 1).t()), skip_n, skip_x // 128 * 128)
        xt = wild(M + skip_x, K + skip_k, 128)
        codes, scales = fp8.quantize_blocks_t(xt, fp8.quantize_rows(xt)[1])
        xt = codes[skip_k:, skip_x // 128 * 128:], scales[skip_k // 128:, skip_x // 128:]
        start = torch.randn(N, K, device=DEVICE)
        mine = start.clone()
        fp8.wgrad(*dyt, *xt, mine)
        for tile in [(128, 128, False, 8, 3), *hopper]:
            other = start.clone()
            fp8.wgrad(*dyt, *xt, other, tile=tile)
            same(mine, other, f"dW, {what}, tile {tile}")
        xt64 = fp8.dequantize_blocks(*xt).double()
        close_to_fp64(mine, dequantize_rows(*dyt), xt64, start.double(), "dW, " + what)


@needs_kernels
@pytest.mark.parametrize("M,C", [(1, 128), (3, 576), (130, 100)] + [(1153, 2560), (700, 4096)] * CUDA)
def test_kernel_fused_quantizers(M, C):
    """What norm and SwiGLU quantize in one kernel has the codes of what they would have written."""
    h, d, dy = (torch.randn(M, C).bfloat16().to(DEVICE) for _ in range(3))
    w = weight(C, device=DEVICE)
    w.write(w.full().abs())                        # so that zeros of the padding are no -0
    for delta in (None, d):
        h_new, rstd, codes = fp8.norm_forward(h, delta, w, 1e-6, quantize=True)
        same(h_new, h if delta is None else h + d, "residual sum")
        y = fp8.norm_output_reference(h_new, rstd, w.data)
        for mine, other in zip((*codes, *fp8.norm_operand(h_new, rstd, w, 1e-6, codes[1])),
                               (*fp8.quantize_rows(y), *fp8.quantize_blocks_t(y, codes[1]))):
            same(mine, other, "norm")
    gate_up = (torch.randn(M, 2 * C) * 4).bfloat16()
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    device, host = both(gate_up)
    y = fp8.swiglu_forward(device, quantize=False)
    codes, scales = fp8.swiglu_forward(device, quantize=True)
    (grad, product), (again, operand) = (fp8.swiglu_backward(dy, device, given) for given in (None, scales))
    for mine, other in zip((codes, scales, *operand, product, again),
                           (*fp8.quantize_rows(y), *fp8.quantize_blocks_t(y, scales), y, grad)):
        same(mine, other, "SwiGLU")
    assert relative(y, fp8.swiglu_reference(host)) < 1e-3
    assert relative(grad, fp8.swiglu_backward_reference(dy.cpu(), host)) < 2e-3


@needs_kernels
def test_kernel_fuzz_quantizers():
    """Random numbers of tokens, strides and sizes of values, with zeros, NaN and Inf among them, to the bit.
    Widths are few, because for each the kernels are compiled."""
    rng = random.Random(0)
    for case in range(FUZZ):
        torch.manual_seed(case)
        M = int(2 ** rng.uniform(0, 9.5 if CUDA else 8))
        C = rng.choice((72, 576, 1300) if CUDA else (72, 200))
        dtype, kind = rng.choice((BF16, BF16, FP32)), rng.choice(("plain", "columns", "transposed"))
        what = case, M, C, dtype, kind
        shape, view = {"plain": ((M, C), lambda x: x), "columns": ((M, C + 24), lambda x: x[:, 8:C + 8]),
                       "transposed": ((C, M), lambda x: x.t())}[kind]
        x = torch.randn(shape) * 10.0 ** (rng.uniform(-25, 25) + torch.rand(shape[0], 1) * rng.uniform(0, 6))
        x[:, rng.randrange(shape[1])] *= rng.choice((0, 1))
        x[rng.randrange(shape[0]), rng.randrange(shape[1])] *= rng.choice((0, 1, 1, 1, math.nan, math.inf))
        device, host = (view(t) for t in both(x.to(dtype)))
        rows, cols = fp8.quantize_rows_reference(host), fp8.quantize_cols_reference(host)
        n = rng.randrange(M) + 1
        mine = fp8.quantize_rows(device)
        pairs = {"rows": (mine, rows),
                 "first rows": (fp8.quantize_rows(device[:n]), (rows[0][:n], rows[1][:, :n])),
                 "turned": (fp8.quantize_blocks_t(device, mine[1]), fp8.quantize_blocks_t_reference(host))}
        pairs["both, rows"], pairs["both, columns"] = zip(fp8.quantize_rows_cols(device), (rows, cols))
        if M >= 140 or fp8.INTERPRET:  # one shape to compile
            pairs["blocks"] = fp8.quantize_blocks(device[:140]), fp8.quantize_blocks_reference(host[:140])
            same(fp8.transpose_codes(rows[0][:140].to(DEVICE)), rows[0][:140].t(), what)
        for name, (mine, other) in pairs.items():
            same(mine[0], other[0], (*what, name)), same(mine[1], other[1], (*what, name))


@needs_kernels
def test_kernel_sum_rows():
    for M, C in ((0, 130), (1, 130), (300, 130), (513, 64)) + ((100_000, 576),) * CUDA:
        x, out = torch.randn(M, C).bfloat16().to(DEVICE), torch.ones(C, device=DEVICE)
        fp8.sum_rows(x, out)
        torch.testing.assert_close(out.cpu().double(), 1 + x.cpu().double().sum(0), rtol=1e-4, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize("keep", ["codes", "data", "both"])
@pytest.mark.parametrize("dtype, max_norm", [(FP32, 1.0), (FP32, 1e9), (BF16, 1e9)])
def test_kernel_adamw(keep, dtype, max_norm, monkeypatch):
    states = []
    for device in (DEVICE, "cpu"):
        if states:
            monkeypatch.setattr(fp8, "use_kernels", lambda x: False)
        weights, optimizer, _ = make_optimizer(keep, 0.1, dtype, (130, 140), device)
        for _ in range(2):
            for w in weights.values():
                w.add_grad(torch.randn(w.shape).to(device))
            optimizer.step(1e-2, max_norm)
        weights["b"].grad[5] = math.nan
        assert not optimizer.step(1e-2, max_norm)[1] and not optimizer.grads.any()
        states.append((optimizer.state(), weights["w"].buffers()))
    (mine, buffers), (other, other_buffers) = states
    for name, x in mine.items():
        assert relative(x, other[name]) < 1e-6
    if max_norm > 1:  # not clipped: no sum, whose order is the device's own
        for a, b in zip([*mine.values(), *buffers], [*other.values(), *other_buffers]):
            same(a, b)


@needs_gpu
def test_kernel_many_rows():
    """More rows than grids on y and z allow, and more elements than 32-bit offsets reach."""
    x = torch.randn(300_000, 128, device="cuda", dtype=BF16)
    same(fp8.quantize_rows(x)[0][-5:], fp8.quantize_rows_reference(x[-5:].cpu())[0])
    x = torch.zeros(2 ** 31 // 4096 + 100, 4096, device="cuda", dtype=BF16)
    x[-1] = 3
    codes, scales = fp8.quantize_rows(x)
    assert (codes[-1].float() == 448).all() and (scales[:, -2] < 1e-12).all()


# ---- kernels of the model: against FP64, as references and as kernels --------------------------------------

HEADS = by_mode([(4, 4, 16), (6, 2, 64), (7, 1, 24)], [(3, 1, 16), (2, 2, 32)],
                [(4, 4, 64), (9, 3, 64), (7, 1, 128), (2, 1, 16), (4, 2, 32)])


def naive_attention(q, k, v, lengths):
    """FP64, one sequence at a time."""
    outs, start = [], 0
    for n in lengths:
        qs, ks, vs = (x[start:start + n].transpose(0, 1) for x in (q, k, v))
        ks, vs = (x.repeat_interleave(len(qs) // len(x), 0) for x in (ks, vs))
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        p = (qs @ ks.mT * q.shape[2] ** -0.5).masked_fill(mask, -torch.inf).softmax(-1)
        outs.append((p @ vs).transpose(0, 1))
        start += n
    return torch.cat(outs)


def random_qkv(lengths, H, G, D, dtype, device="cpu"):
    return [torch.randn(sum(lengths), n, D).to(dtype).to(device) for n in (H, G, G)]


@pytest.mark.parametrize("H,G,D", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_attention_against_fp64(H, G, D, dtype, monkeypatch):
    torch.manual_seed(0)
    lengths = by_mode([5, 0, 300, 64, 65, 1], [66, 1], [5, 0, 2300, 64, 129, 1])
    monkeypatch.setattr(model, "SPLIT", by_mode(128, 64, model.SPLIT))
    q, k, v = (x.requires_grad_() for x in random_qkv(lengths, H, G, D, dtype, DEVICE))
    o = model.attention(q, k, v, model.pack(lengths, DEVICE))
    q2, k2, v2 = (x.detach().double().requires_grad_() for x in (q, k, v))
    o2, do = naive_attention(q2, k2, v2, lengths), torch.randn(o.shape).to(dtype).to(DEVICE)
    assert relative(o, o2) < LIMIT[dtype]
    grads = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    again = torch.autograd.grad(o, (q, k, v), do)
    for name, a, b, c in zip("qkv", grads, torch.autograd.grad(o2, (q2, k2, v2), do.double()), again):
        assert relative(a, b) < LIMIT[dtype], name
        same(a, c, f"d{name}, a second time")


def naive_qk_norm_rope(qkv, qw, kw, eps, table, positions, H, G):
    """FP64 with autograd."""
    D = qkv.shape[1] // (H + 2 * G)
    q, k, v = qkv.view(len(qkv), -1, D).split([H, G, G], 1)
    cos, sin = table[positions.long()].double()[:, None].chunk(2, -1)
    out = []
    for x, w in ((q, qw), (k, kw)):
        if w is not None:
            x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w
        a, b = x.chunk(2, -1)
        out.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    return *out, v


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H,G,D", [(3, 1, 16)] + [(9, 3, 64), (32, 8, 128)] * CUDA)
def test_kernel_qk_norm_rope(H, G, D, dtype, norm):
    torch.manual_seed(2)
    T, config = 37, tiny_config(head_dim=D)
    table = model.rope_table(config, 100, DEVICE)
    positions = torch.randint(0, 100, (T,), dtype=torch.int32).to(DEVICE)
    qkv = torch.randn(T, (H + 2 * G) * D).to(dtype).to(DEVICE).requires_grad_()
    ws = [weight(D, dtype=dtype, device=DEVICE) if norm else None for _ in range(2)]
    out = model.qk_norm_rope(qkv, *ws, 1e-6, table, positions, H, G)
    gs = [torch.randn(x.shape).to(dtype).to(DEVICE) for x in out]
    grad, = torch.autograd.grad(out, qkv, gs)
    qkv2 = qkv.detach().double().requires_grad_()
    ws2 = [w.data.double().requires_grad_() if norm else None for w in ws]
    out2 = naive_qk_norm_rope(qkv2, *ws2, 1e-6, table, positions, H, G)
    grad2 = torch.autograd.grad(out2, [qkv2] + ws2 * norm, [g.double() for g in gs])
    for a, b in zip([*out, grad] + [w.grad for w in ws if norm], [*out2, *grad2]):
        assert relative(a, b) < LIMIT[dtype]
    some = slice(5, 9)
    for a, b in zip(model.qk_norm_rope(qkv[some].detach(), *ws, 1e-6, table, positions[some], H, G), out):
        same(a, b[some], "a few rows")


def test_fp8_kv_definition():
    """A power of two takes the largest value of a head to (224, 448]; codes times it are BF16 numbers. Beyond
    128 * 448 they saturate."""
    x = (torch.randn(40, 3, 16) * torch.logspace(-30, 4, 40)[:, None, None]).bfloat16()
    x[0, 0], x[1, 0], x[2, 0, :2], x[3, 0, 0] = 0, -448 * 2.0 ** 7, torch.tensor([450.0, -226]), torch.inf
    x[4, 0, :2] = torch.tensor([3e38, 64.0])
    codes, scales, values = model.quantize_heads_reference(x)
    assert codes.dtype == fp8.E4M3 and scales.dtype == FP32 and values.dtype == BF16
    assert scales[1, 0] == 2 ** 7 and scales[2, 0] == 2, "448 fits exactly, 450 takes the next power of two"
    assert values[4, 0, :2].tolist() == [57344, 64] and scales[4, 0] == 128
    assert not values[3, 0].isfinite().any() and not values[0, 0].any()
    rest = torch.ones(40, 3, dtype=torch.bool)
    rest[:5, 0] = False
    assert (scales[rest].double().log2() % 1 == 0).all()
    assert torch.equal(values[rest].double(), (codes.double() * scales.double()[..., None])[rest])
    large = rest & (x.float().abs().amax(2) > 1e-9)
    peak = (x.double().abs().amax(2) / scales.double())[large]
    assert (peak > 224).all() and (peak <= 448).all() and relative(values[large], x[large]) < 0.04


@pytest.mark.parametrize("D", model.HEAD_SIZES)
def test_code_places(D):
    """A page has a place for every code; 512 bytes in a row are what PTX deals to a warp, 16 to a thread, as
    right operands of four m16n8k16: thread 4n + l holds column n at depths 2l, 2l + 1, 2l + 8, 2l + 9."""
    k, v = model.code_places(D, "cpu")
    for places in k, v:
        assert torch.equal(places.flatten().sort()[0], torch.arange(PAGE * D)) and places.shape == (PAGE, D)
    if D >= 64:
        n, l, four = torch.arange(8).view(8, 1, 1, 1), torch.arange(4).view(4, 1, 1), torch.arange(4)[:, None]
        depth = 2 * l + torch.tensor([0, 1, 8, 9])
        same(k[8 + n, 16 * four + depth].flatten(), torch.arange(512, 1024), "keys 8 to 15, elements 0 to 63")
        same(v[depth, 8 * four + n].flatten(), torch.arange(512), "keys 0 to 15, elements 0 to 31")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H,G,D", [(3, 1, 16), (2, 1, 128)] + [(9, 3, 64), (32, 8, 128)] * CUDA)
def test_kernel_fp8_kv(H, G, D, dtype):
    """k and v are rounded to codes * scales, in the trainer and, the same codes, on pages; gradients pass."""
    torch.manual_seed(3)
    T, page_count = by_mode(37, 9, 37), 3
    qkv = torch.randn(T, (H + 2 * G) * D).to(dtype).to(DEVICE).requires_grad_()
    ws = [weight(D, dtype=dtype, device=DEVICE) for _ in range(2)]
    table = model.rope_table(tiny_config(head_dim=D), 100, DEVICE)
    args = 1e-6, table, torch.arange(T, dtype=torch.int32, device=DEVICE), H, G
    q, k, v = model.qk_norm_rope(qkv, *ws, *args)
    rounded = [model.quantize_heads_reference(x.detach().cpu()) for x in (k, v)]
    slots = torch.randperm(page_count * PAGE)[:T]
    cache = model.empty_cache(page_count, G, D, True, dtype, DEVICE)
    training = model.qk_norm_rope(qkv, *ws, *args, True)
    sampling = model.qk_norm_rope(qkv.detach(), *ws, *args, True, cache, slots.to(DEVICE))
    for mine, other, want in zip(training, sampling, (q, rounded[0][2], rounded[1][2])):
        same(mine, want, "training"), same(other, want, "sampling")
    (k_codes, k_scale, _), (v_codes, v_scale, _) = rounded
    expected = model.empty_cache(page_count, G, D, True, dtype, "cpu")
    model.write_pages_reference((k_codes, v_codes, k_scale, v_scale), expected, slots)
    for pages, want in zip(cache, expected):
        same(pages.cpu(), want, "pages")
    for values, want in zip(model.read_pages_reference(expected, torch.arange(page_count)), rounded):
        same(values[slots // PAGE, :, slots % PAGE], want[2].float(), "pages read back")
    plain = model.empty_cache(page_count, G, D, False, dtype, DEVICE)
    sampling = model.qk_norm_rope(qkv.detach(), *ws, *args, False, plain, slots.to(DEVICE))
    for mine, want in zip(sampling, (q, k, v)):
        same(mine, want, "sampling without FP8")
    for pages, want in zip(plain, (k, v)):
        same(pages[slots // PAGE, :, slots % PAGE], want, "pages without FP8")
    gs = [torch.randn_like(x) for x in training]
    same(*(torch.autograd.grad(out, qkv, gs)[0] for out in ((q, k, v), training)), "straight-through")


@pytest.fixture
def several_tiles(monkeypatch):
    """Interpreted, one program of the head takes all tiles; on a GPU it takes many."""
    if fp8.INTERPRET:
        monkeypatch.setattr(fp8, "multiprocessors", lambda device: 1)


def head_inputs(T, V, C, dtype, temperature=0.7):
    return (torch.randn(T, C).to(dtype).to(DEVICE), weight(V, C, dtype=dtype, device=DEVICE, scale=C ** -0.5),
            torch.randint(0, V, (T,)).to(DEVICE), torch.tensor([1 / temperature], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,V,C", by_mode([(33, 260, 96), (1030, 50, 16), (0, 50, 16)], [(20, 300, 40)],
                                          [(300, 260, 96), (300, 49152, 576), (300, 151936, 1024)]))
def test_kernel_token_logprobs(T, V, C, dtype, several_tiles):
    torch.manual_seed(3)
    hidden, w, targets, inv_temp = head_inputs(T, V, C, dtype)
    logp, g = token_logprobs(hidden.requires_grad_(), w, targets, inv_temp), torch.randn(T).to(DEVICE)
    logp.backward(g)
    h2, w2 = hidden.detach().double().requires_grad_(), w.data.double().requires_grad_()
    logp2 = ((h2 @ w2.t()) * inv_temp.double()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    logp2.backward(g.double())
    assert relative(logp, logp2) < LIMIT[FP32]  # FP32 whatever the type of the weights
    assert relative(hidden.grad, h2.grad) < LIMIT[dtype] and relative(w.gradient(), w2.grad) < LIMIT[dtype]


def sample_all(hidden, w, inv_temp, keys, positions, noise=1.0, seed=11):
    make = lambda x, dtype: torch.tensor([x], dtype=dtype, device=hidden.device)
    return model.sample(hidden, w, inv_temp, make(noise, FP32), make(seed, torch.int64), keys, positions)


@needs_kernels
@pytest.mark.parametrize("seed", [2 ** 40 + 7, -9 * 2 ** 50])
def test_kernel_sample_against_reference(seed):
    """The reference's noise: on a GPU nearly all tokens agree, as the last bits of logits differ."""
    torch.manual_seed(10)
    T, V, C = by_mode(None, (20, 260, 96), (256, 1000, 128))
    hidden, w, _, inv_temp = head_inputs(T, V, C, DTYPES[0])
    keys, positions = torch.arange(T) * 2 ** 33 - 5, torch.arange(T, dtype=torch.int32) * 7
    tokens, logp = sample_all(hidden, w, inv_temp, keys.to(DEVICE), positions.to(DEVICE), seed=seed)
    tokens2, logp2 = model.head_reference(hidden.cpu(), w.data.cpu(), inv_temp.cpu(), None, torch.ones(1),
                                    torch.tensor([seed]), keys, positions)[:2]
    agree = tokens.cpu() == tokens2
    assert agree.sum() >= T - 2 * CUDA, f"{int((~agree).sum())} of {T} tokens differ"
    assert relative(logp.cpu()[agree], logp2[agree]) < 1e-5


def test_kernel_greedy_takes_the_lowest_of_ties():
    hidden, w = torch.ones(3, 16, dtype=DTYPES[0], device=DEVICE), Weight((300, 16), DTYPES[0], DEVICE)
    one, keys = torch.ones(1, device=DEVICE), torch.arange(3, device=DEVICE)
    assert sample_all(hidden, w, one, keys, keys.int(), noise=0.0)[0].tolist() == [0, 0, 0]
    full = torch.zeros(300, 16, device=DEVICE)
    full[[140, 141, 290]] = 1.0  # ties within a vocabulary tile and across tiles
    w.write(full)
    assert sample_all(hidden, w, one, keys, keys.int(), noise=0.0)[0].tolist() == [140] * 3


@pytest.mark.parametrize("V,limit", [(12, 37.4), (300, 396.0)])  # one vocabulary tile; two and a part
def test_sample_distribution(V, limit):
    """10,000 draws of V tokens against the softmax: chi-square below its 0.9999 quantile."""
    torch.manual_seed(5)
    n = 10000
    hidden, w = torch.randn(1, 16).expand(n, 16).contiguous(), weight(V, 16, dtype=FP32, scale=0.3)
    inv_temp, draw = torch.tensor([1 / 0.8]), torch.arange(n)
    tokens, logp = sample_all(hidden, w, inv_temp, draw // 4, (draw % 4).int())
    expected = n * (hidden[0] @ w.data.t() * inv_temp).softmax(-1)
    chi2 = ((torch.bincount(tokens, minlength=V) - expected).square() / expected).sum().item()
    assert chi2 < limit, f"chi-square {chi2:.1f}"
    assert relative(logp.exp(), expected[tokens] / n) < 1e-6


def test_noise_ends():
    """The largest and smallest 32-bit words give finite noise; small words keep their relative accuracy."""
    words = torch.tensor([0, 1, 2 ** 26 - 64, 2 ** 26 + 64, 2 ** 31, 2 ** 32 - 1])
    g, u = model.gumbel_reference(words), (words.double() + 0.5) / 2 ** 32
    assert g.isfinite().all() and g[0] > 22.8 and g[-1] < -2.8
    assert (g[:-1].double() - -(-torch.log1p(-u[:-1])).log()).abs().max() < 5e-6


def test_kernel_embed():
    T, V, C = by_mode((200, 30, 24), (50, 9, 24), (3000, 500, 576))
    torch.manual_seed(6)
    tokens, g, grads = torch.randint(0, V, (T,)), torch.randn(T, C).to(BF16).to(DEVICE), []
    tokens[::3] = 4  # one long segment
    tokens, w = tokens.to(DEVICE), weight(V, C, device=DEVICE)
    for _ in range(2):
        w.grad = torch.ones(V, C, device=DEVICE)
        x = model.embed(tokens, w)
        same(x, w.data[tokens], "rows")
        x.backward(g)
        grads.append(w.grad)
    expected = torch.ones(V, C, dtype=torch.float64, device=DEVICE).index_add_(0, tokens, g.double())
    assert relative(grads[0], expected) < 1e-6
    same(*grads, "a second time")


# ---- without a GPU: interpreted, and compiled for Hopper ---------------------------------------------------


def beside(*arguments, **environment):
    """Python in a process of its own that runs beside the tests."""
    text = tempfile.TemporaryFile("w+")          # a pipe that nobody reads would stop it when full
    return text, subprocess.Popen([sys.executable, *arguments], cwd=HERE, env=ONE_THREAD | environment,
                                  stdin=subprocess.DEVNULL, stdout=text, stderr=subprocess.STDOUT)


def finished(started, seconds=120):
    """-> exit status, all that it said. One that hangs is ended, with all its ranks, and fails the test."""
    text, process = started
    try:
        status = process.wait(seconds)
    finally:
        process.terminate()     # torchrun ends its ranks; a no-op when it has ended
    text.seek(0)
    return status, text.read()


def output(started, seconds=120):
    status, said = finished(started, seconds)
    assert status == 0, said[-5000:]
    return said


@pytest.fixture(scope="session", autouse=True)
def background(request, tmp_path_factory):
    """What takes long, started with the session."""
    runs, chosen = {}, {item.name for item in request.session.items}
    if not (CUDA or fp8.INTERPRET or fp8.triton is None):
        if "test_interpreted" in chosen:
            command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "kernel", __file__]
            runs["interpreted"] = beside(*command, TRITON_INTERPRET="1")
        for name in ("fp8", "model", "rollout"):
            if f"test_every_kernel_builds_for_hopper[{name}]" in chosen:
                command = "-c", f"import test_fp8; test_fp8.build_{name}()"
                runs[name] = beside(*command, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    yield runs
    for run in runs.values():
        run[1].kill()


class StubDriver:
    """Answers the few questions that Triton's JIT asks a driver before it would launch: compile for sm_90."""

    launcher_cls, utils = staticmethod(lambda *args, **options: None), None
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)
    get_device_interface = staticmethod(lambda: torch.cpu)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    map_python_to_cpp_type = staticmethod(lambda kind: "int")
    is_active = staticmethod(lambda: True)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)


MATRIX_UNITS = {"plain_kernel": "QGMMA", "product_kernel": "QGMMA", "decode_kernel": "QGMMA",
                "attention_kernel": "HGMMA", "attention_dkv_kernel": "HGMMA",
                "attention_dq_kernel": "HGMMA", "head_kernel": "HGMMA", "dlogits_kernel": "HGMMA"}


class Recorder:
    """Stands in for a kernel: compiles what the wrapper would launch; inspects spills and instructions."""

    def __init__(self, kernel):
        self.kernel, self.name = kernel, kernel.fn.__name__

    def __getitem__(self, grid):
        return lambda *args, **options: self.inspect(self.kernel.warmup(*args, grid=grid, **options),
                                                     options.get("launch_pdl", False))

    def inspect(self, compiled, early):
        tool = Path(fp8.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(compiled.asm["cubin"])
            f.flush()
            usage, sass = (subprocess.run([tool, flag, f.name], capture_output=True, text=True).stdout
                           for flag in ("--dump-resource-usage", "--dump-sass"))
        read = {key: int((re.search(key + r":(\d+)", usage) or [0, 0])[1])
                for key in ("REG", "STACK", "LOCAL")}
        found = sorted(set(re.findall(r"\b(QGMMA|HGMMA|HMMA|LDL|STL)", sass)))
        print("BUILT", self.name, read, *found, "shared", compiled.metadata.shared, flush=True)
        assert compiled.metadata.shared <= 227 * 1024, f"{self.name}: more shared memory than a Hopper has"
        assert ("ACQBULK" in sass) == early, f"{self.name}: one that starts early waits for its inputs"
        # Kernels that need all the registers of a thread spill a few numbers of their bookkeeping (bytes; the
        # largest figure of triton 3.6 to 3.9): none of them a value of the sums.
        allowed = {"attention_dkv_kernel": 24, "paged_attention_kernel": 40, "product_kernel": 8}
        if read["STACK"] > allowed.get(self.name, -1):
            assert not {"LDL", "STL"} & set(found) and not read["LOCAL"], f"{self.name} spills"
        if self.name in MATRIX_UNITS:
            assert MATRIX_UNITS[self.name] in found, f"{self.name} leaves the Hopper matrix units"
        assert not ("HMMA" in found and MATRIX_UNITS.get(self.name) == "QGMMA"), f"{self.name} is not FP8"


def record_kernels(module):
    from triton.runtime import driver
    driver.set_active(StubDriver())
    fp8.overlap = True                           # as in a decode step
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        setattr(module, name, Recorder(getattr(module, name)))


def build_fp8():
    """Every public function of fp8.py on CPU tensors, with launches that compile instead."""
    record_kernels(fp8)
    fp8.use_kernels, fp8.multiprocessors = lambda x: True, lambda device: 132
    for M, C in ((200, 4096), (1, 576)):
        h = torch.zeros(M, C, dtype=BF16, requires_grad=C > 576)  # backward passes at one width
        up, down, out = (Weight(s, keep="codes") for s in ((2 * C, C), (192, C), (C, 192)))
        bias, norm_w = Weight((2 * C,)), Weight((C,))
        h_new, y = fp8.norm_linear(h, h, norm_w, 1e-6, up, bias, fp8=True)
        z = fp8.linear(fp8.swiglu_linear(y, down, fp8=True), out)
        y = fp8.norm(h_new, z, norm_w, 1e-6)[1]
        if h.requires_grad:
            (y + h_new).backward(torch.zeros_like(h))
    h, gate_up = h.detach(), torch.zeros(1, 2 * C, dtype=BF16)
    fp8.quantize_blocks(h)
    fp8.swiglu_forward(gate_up, False), fp8.swiglu_backward(h, gate_up, None)
    for keep, states in (("codes", FP32), ("data", FP32), ("both", FP32), ("codes", BF16), ("both", BF16)):
        adamw({"w": Weight((192, 300), keep=keep)}, states=states).step(1e-3, 1.0)
    w = fp8.quantize_blocks_reference(torch.zeros(250, 512))
    for tile in fp8.DECODE_TILES:
        x = fp8.quantize_rows_reference(torch.zeros(16, 512))
        fp8.fprop(*x, *w, torch.zeros(250, dtype=BF16), tile=tile)
    fp8.multiprocessors = lambda device: 0
    for M in (16, 17, 64, 129):  # every tile of the plain kernel
        x = fp8.quantize_rows_reference(torch.zeros(M, 512))
        fp8.fprop(*x, *w)
    fp8.multiprocessors = lambda device: 132
    x, (codes, scales) = fp8.quantize_rows_reference(h), fp8.quantize_blocks_reference(torch.zeros(200, C))
    turned = scales.t().contiguous().t()
    fp8.fprop(*x, codes, scales, torch.zeros(200, dtype=BF16), tile=fp8.HOPPER)
    fp8.fprop(*x, codes, turned, tile=fp8.HOPPER)
    narrow = fp8.quantize_blocks_reference(torch.zeros(512, 128))  # scales (1, 4), strides that TMA refuses
    dy = fp8.quantize_rows_reference(torch.zeros(16, 512))
    fp8.fprop(*dy, fp8.transpose_codes(narrow[0]), narrow[1].t(), tile=fp8.HOPPER)
    for K in (200, 256):  # columns with and without a ragged end
        x = torch.zeros(300, K)
        operands = *fp8.quantize_cols_reference(x), *fp8.quantize_blocks_t_reference(x)
        for tile in (fp8.HOPPER, fp8.SQUARE):
            fp8.wgrad(*operands, torch.zeros(K, K), tile=tile)


def build_model():
    """The same for the kernels of model.py, at several head sizes and the largest vocabulary."""
    record_kernels(model)
    model.use_kernels, fp8.multiprocessors = lambda x: True, lambda device: 132
    empty = lambda *shape: torch.empty(shape, dtype=BF16)
    zeros = lambda *shape, dtype=torch.int64: torch.zeros(shape, dtype=dtype)
    for H, G, D in ((4, 2, 32), (9, 3, 64), (32, 8, 128)):
        packing = model.pack([300, 5], "cpu")
        packing.rows = 128
        q, k, v = (empty(305, n, D) for n in (H, G, G))
        o, lse = model.attention_forward(q, k, v, packing)
        model.attention_backward(o, q, k, v, o, lse, packing)
        caches = [model.empty_cache(4, G, D, fp8_kv, BF16, "cpu") for fp8_kv in (False, True)]
        for cache, pages in itertools.product(caches, (3, 65)):  # one part, and three to merge
            for quantize in (False, True):
                table, lengths = zeros(2, pages, dtype=torch.int32), zeros(2, dtype=torch.int32)
                model.paged_attention(q[:2], cache, table, lengths, quantize)
        for w in (empty(D), None):
            args = empty(305, (H + 2 * G) * D), w, w, 1e-6, torch.empty(300, D), packing.positions
            model.qk_norm_rope_backward(q, k, v, *args)
            for fp8_kv, cache in enumerate(caches):
                model.qk_norm_rope_forward(*args, H, G, fp8_kv, cache, zeros(305))
    one, w = torch.ones(1), empty(151936, 4096)
    for n in (1, 65):  # both tiles
        hidden = empty(n, 4096)
        model.head_forward(hidden, w, one, zeros(n))
        model.head_forward(hidden, w, one, None, one, zeros(1), zeros(n), zeros(n, dtype=torch.int32))
        model.dlogits(hidden, w, one, zeros(n), torch.empty(n), torch.empty(n))
    model.embed_backward(empty(9, 96), zeros(9), torch.empty(260, 96))


def build_rollout():
    record_kernels(rollout)
    rollout.use_kernels = lambda x: True
    rollout.advance(torch.zeros(40, dtype=torch.int64), torch.zeros(40), *step_state(512, 272, 16))


needs_background = pytest.mark.skipif(CUDA or fp8.INTERPRET or fp8.triton is None,
                                      reason="needs triton, and no GPU")


@needs_background
def test_interpreted(background):
    assert " passed" in output(background["interpreted"], 900)


@needs_background
@pytest.mark.parametrize("module", [fp8, model, rollout], ids=["fp8", "model", "rollout"])
def test_every_kernel_builds_for_hopper(background, module):
    built = output(background[module.__name__], 900)
    print(built)
    names = {name for name in vars(module) if name.endswith("_kernel")}
    assert set(re.findall(r"BUILT (\w+)", built)) == names


@pytest.mark.parametrize("changes,capability,dtype,words", [
    ({}, (8, 6), BF16, ("compute capability 8.9", "8.6", "--precision=bf16 --kv=bf16")),
    ({}, (9, 0), FP32, ("torch.float32", "torch.bfloat16")),
    ({"head_dim": 48}, (9, 0), BF16, ("head_dim 48", "16, 32, 64, 128", "--device=cpu")),
    ({"num_attention_heads": 34}, (9, 0), BF16, ("34 query heads over 2 key heads", "16")),
    ({"hidden_size": 60}, (9, 0), BF16, ("hidden_size 60", "multiples of 8"))])
def test_gpu_refuses_before_weights_are_loaded(monkeypatch, changes, capability, dtype, words):
    found = {"is_available": True, "get_device_capability": capability, "get_device_name": "X"}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    with pytest.raises((ValueError, RuntimeError)) as error:
        model.check_device(torch.device("cuda"), "fp8", tiny_config(**changes), "bf16", dtype)
    assert all(word in str(error.value) for word in words)


# ============================================================================================================
# 3  Exactness: a log-probability's bits depend on its sequence, and on nothing else
# ============================================================================================================


def page_pool(values, lengths, seed=0):
    """`values` (T, G, ...) on pages at random places, not 0 -> cache, table (B, max). Elsewhere is NaN, or
    the largest code: not read, or masked."""
    rng, device = random.Random(seed), values[0].device
    counts = [-(-n // model.PAGE) for n in lengths]
    pages = list(range(1, sum(counts) + 4))
    rng.shuffle(pages)
    cache = [torch.full((len(pages) + 1, x.shape[1], PAGE, *x.shape[2:]),
                        448.0 if x.dtype == fp8.E4M3 else torch.nan).to(x.dtype).to(device) for x in values]
    table = torch.full((len(lengths), max(counts + [1]) + 1), pages.pop(), dtype=torch.int32)
    slots = []
    for b, n in enumerate(lengths):
        for j in range(counts[b]):
            table[b, j] = pages.pop()
        place = torch.arange(n)
        slots.append(table[b, place // model.PAGE].long() * model.PAGE + place % model.PAGE)
    model.write_pages_reference(values, cache, torch.cat(slots).to(device))
    return cache, table.to(device)


@pytest.mark.parametrize("H,G,D", by_mode(
    [(2, 2, 16), (6, 2, 64), (7, 1, 16)], [(3, 1, 16), (2, 1, 128)],
    [(4, 4, 64), (6, 2, 64), (7, 1, 128), (8, 2, 128), (2, 1, 16)]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_attention_packed_alone_paged(H, G, D, dtype, monkeypatch):
    """Packed in one order, in another, alone, and decoded over pages, BF16 or FP8: the same bits."""
    torch.manual_seed(1)
    lengths = by_mode([3, 64, 129, 1, 0, 63, 300], [65, 0],
                      [1, 5000, 64, 65, 0, 777, 130, 1024, 16, 127, 128, 129, 2048, 2049])
    monkeypatch.setattr(model, "SPLIT", by_mode(128, 64, model.SPLIT))
    q, k, v = random_qkv(lengths, H, G, D, dtype, DEVICE)
    (k_codes, k_scale, k), (v_codes, v_scale, v) = map(model.quantize_heads_reference, (k, v))
    stored = (k, v), (k_codes, v_codes, k_scale, v_scale)
    o = model.attention(q, k, v, model.pack(lengths, DEVICE)).split(lengths)
    qs, ks, vs = (x.split(lengths) for x in (q, k, v))
    turned = lengths[::-1]
    other = model.attention(*(torch.cat(x[::-1]) for x in (qs, ks, vs)), model.pack(turned, DEVICE))
    for i, out in enumerate(other.split(turned)[::-1]):
        same(out, o[i], f"sequence {i} in another order")
    for i in range(0, len(lengths), 2):
        alone = model.attention(qs[i], ks[i], vs[i], model.pack([lengths[i]], DEVICE))
        same(alone, o[i], f"sequence {i} alone")
    for step in range(by_mode(6, 1, 8)):
        rng = random.Random(step)
        now = [rng.randint(min(n, 1), n) if step else n for n in lengths]
        values = [torch.cat([part[:n] for part, n in zip(x.split(lengths), now)]) for x in stored[step % 2]]
        cache, table = page_pool(values, now, seed=step)
        last = torch.stack([x[n - 1] if n else torch.ones_like(q[0]) for x, n in zip(qs, now)])
        inputs = last, cache, table, torch.tensor(now, dtype=torch.int32, device=DEVICE)
        out = model.paged_attention(*inputs)
        for mine, want in zip(model.paged_attention(*inputs, quantize=True), fp8.quantize_rows(out)):
            same(mine, want, "quantized")
        out = out.view(last.shape)
        for i, n in enumerate(now):
            expected = o[i][n - 1] if n else torch.zeros_like(out[i])
            same(out[i], expected, f"decode of sequence {i} at length {n}")


@pytest.mark.parametrize("T,V,C", by_mode([(70, 260, 96)], [(20, 260, 96)],
                                          [(300, 260, 96), (300, 49152, 576), (300, 151936, 1024)]))
def test_kernel_sampled_and_scored(T, V, C, several_tiles):
    """The log-probability has the scorer's bits; slot, order and batch change neither it nor the token."""
    torch.manual_seed(4)
    hidden, w, _, inv_temp = head_inputs(T, V, C, DTYPES[-1])
    keys = torch.randint(-2 ** 62, 2 ** 62, (T,)).to(DEVICE)
    positions = torch.randint(0, 5000, (T,), dtype=torch.int32).to(DEVICE)
    tokens, logp = sample_all(hidden, w, inv_temp, keys, positions)
    same(token_logprobs(hidden, w, tokens, inv_temp), logp, "scored")
    for n in by_mode((1, 7, 33, 64), (), (1, 7, 16, 17, 64, 65)):  # NumPy's product depends on the rows
        rows = torch.randperm(T)[:n].to(DEVICE)
        t, p = sample_all(hidden[rows], w, inv_temp, keys[rows], positions[rows])
        assert torch.equal(t, tokens[rows])
        same(p, logp[rows], f"sampled, {n} rows")
        same(token_logprobs(hidden[rows], w, tokens[rows], inv_temp), logp[rows], f"scored, {n} rows")
    base = dict(hidden=hidden, w=w, inv_temp=inv_temp, keys=keys, positions=positions)
    for change in (dict(seed=12), dict(keys=keys + 2 ** 32), dict(positions=positions + 1)):
        assert not torch.equal(sample_all(**{**base, **change})[0], tokens), f"no noise by {list(change)}"


@needs_gpu
def test_kernel_head_past_one_chunk():
    """More tokens than a chunk of the head, and than 2^31 logits: each part has the whole's bits."""
    torch.manual_seed(9)
    hidden, w, targets, inv_temp = head_inputs(15000, 151936, 256, BF16)
    logp = token_logprobs(hidden, w, targets, inv_temp)
    for rows in (slice(0, 1), slice(4095, 4098), slice(14900, 15000)):
        part = token_logprobs(hidden[rows].contiguous(), w, targets[rows], inv_temp)
        same(part, logp[rows], f"rows {rows}")


def scale_up(policy, factor=8.0):
    """Random weights of 0.02 give nearly uniform logits; sharper ones make every wrong bit visible."""
    scale = lambda w: factor if len(w.shape) == 2 else 1
    policy.load((name, w.full() * scale(w)) for name, w in policy.weights().items())
    return policy


def make_policy(precision, kv="bf16"):
    sizes = dict(hidden_size=256, intermediate_size=384, head_dim=64) if CUDA else {}
    return scale_up(Transformer(tiny_config(**sizes), precision, DEVICE, kv=kv))


@pytest.fixture(scope="module", ids="-".join,
                params=[("fp8", "bf16"), ("fp8", "fp8")] if CUDA else [("fp8", "bf16"), ("bf16", "fp8")])
def policy(request):
    """(linears, KV). On a GPU only FP8 linears make the promise: cuBLAS chooses how to sum by the number of
    rows."""
    return make_policy(*request.param)


def some_prompts(lengths, seed=0, vocab=131):
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def drawn(result):
    """All that a rollout holds, with log-probs as bits, to compare by ==."""
    return [(tokens, bits(logprobs).tolist(), finish)
            for tokens, logprobs, finish in zip(result.tokens, result.logprobs, result.finish)]


PROMPTS = some_prompts([1, 2, 63, 64, 65, 66, 130, 5])
LIMITS = [70, 3, 1, 5, 20, 66, 9, 40]


@pytest.fixture(scope="module")
def alone(policy):
    """Every completion in a run of its own."""
    return [drawn(Sampler(policy).generate([p], 1, m, seed=5, keys=[100 + i]))[0]
            for i, (p, m) in enumerate(zip(PROMPTS, LIMITS))]


@pytest.mark.parametrize("slots, pages, steps, prefill", [
    (1, None, 1, 100), (3, None, 50, 16384), (8, 8, 4, 1), (3, 5, 16, 16384)])
def test_same_bits_whatever_the_schedule(policy, alone, slots, pages, steps, prefill, monkeypatch):
    """Slots, order, pages, decode steps from one look to the next, tokens that are prefilled together."""
    monkeypatch.setattr(rollout, "STEPS_PER_LOOK", {DEVICE: steps})
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", prefill)
    order = list(range(len(PROMPTS)))
    random.Random(slots).shuffle(order)
    sampler = Sampler(policy, max_slots=slots, pages=pages)
    result = sampler.generate([PROMPTS[i] for i in order], 1, [LIMITS[i] for i in order], seed=5,
                              keys=[100 + i for i in order])
    assert drawn(result) == [alone[i] for i in order]
    assert sampler.pool.free == sampler.pool.capacity


def test_trainer_recomputes_the_same_bits(policy, monkeypatch):
    monkeypatch.setattr(model, "SPLIT", 2 * PAGE)  # a tile of queries fits into one part: some have two
    result = Sampler(policy, max_slots=5).generate(PROMPTS, 2, 20, temperature=0.7, seed=3)
    pairs = [(PROMPTS[i // 2], tokens) for i, tokens in enumerate(result.tokens)]
    for order in (pairs, pairs[::-1]):
        with torch.no_grad():
            scores = train.score(policy, order, torch.tensor([1 / 0.7], device=DEVICE))
        expected = [result.logprobs[pairs.index(pair)] for pair in order]
        same(scores, torch.cat(expected))


def test_pages_are_the_same_from_prefill_and_decode(policy):
    """By the comparison of `bench.py exact`. Places that a sequence has not filled may hold anything; one
    other bit of a key that it has counts."""
    prompt, sampler = some_prompts([70])[0], Sampler(policy, max_slots=1)
    tokens = sampler.generate([prompt], 1, 80, seed=1, stop=[]).tokens[0]
    filled = len(prompt + tokens) - 1 - PAGE * 2  # keys on the third page: the last token is never fed
    # The pool hands out the lowest numbers first.
    caches = [tuple(pages[1:4] for pages in cache) for cache in sampler.pool.caches]
    compare = lambda: bench.compare_pages(policy, {0: caches}, [(prompt, tokens)])
    count = 3 * len(sum(caches, ()))
    assert compare() == (count, 0)
    values, D = caches[1][1].view(torch.uint8), policy.config.head_dim
    in_rows = torch.arange(values[0, 0].numel()).view(PAGE, -1)
    places = model.code_places(D, "cpu")[1] if policy.kv == "fp8" else in_rows
    for key, differing in ((filled, 0), (filled - 1, 1)):
        values[2, 1].view(-1)[places[key, 3]] ^= 1
        assert compare() == (count, differing)


# ============================================================================================================
# 4  Model, checkpoints, tokenizer
# ============================================================================================================

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
DROP = object()


def config_of(tmp_path, **changes):
    raw = {k: v for k, v in {"model_type": "qwen3", **SIZES, **changes}.items() if v is not DROP}
    write_json(tmp_path / "config.json", raw)
    return Config.from_folder(tmp_path)


@pytest.mark.parametrize("changes, theta, scaling", [
    (dict(rope_parameters=dict(rope_theta=1e6, rope_type="default")), 1e6, None),
    (dict(rope_scaling=LLAMA3), 1e6, LLAMA3),
    (dict(rope_scaling={"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}), 1e6, LLAMA3),
    (dict(rope_theta=DROP, rope_parameters=dict(rope_theta=5e5, **LLAMA3)), 5e5, LLAMA3),
    (dict(rope_scaling={"type": "default"}), 1e6, None),
    (dict(sliding_window=8, use_sliding_window=False, max_window_layers=2), 1e6, None),
    (dict(layer_types=["full_attention"] * 2, pretraining_tp=1, mlp_bias=False), 1e6, None),
])
def test_config_accepts(tmp_path, changes, theta, scaling):
    config = config_of(tmp_path, **changes)
    assert config.rope_theta == theta and config.rope_scaling == scaling
    write_json(tmp_path / "config.json", config.to_dict())
    assert Config.from_folder(tmp_path) == config


@pytest.mark.parametrize("changes, words", [
    (dict(model_type="mixtral"), "model_type 'mixtral'"), (dict(model_type=DROP), "model_type None"),
    (dict(model_type=["qwen3"]), "model_type"),
    (dict(rope_theta=DROP), "no rope_theta"),
    (dict(rope_parameters=dict(rope_theta=1e4)), "rope_theta is 10000.0 in one place and 1000000.0"),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))), "rope_parameters"),
    (dict(rope_scaling=dict(type="yarn", factor=4.0)), "'yarn'"),
    (dict(rope_scaling=dict(rope_type="linear", factor=4.0)), "'linear'"),
    (dict(rope_scaling=dict(rope_type="llama3", type="yarn")), "rope_type is 'llama3' in one place"),
    (dict(rope_scaling=dict(factor=4.0)), "factor"),
    (dict(rope_scaling=dict(LLAMA3, high_freq_factor=1.0)), "high_freq_factor"),
    (dict(rope_scaling=dict(LLAMA3, factor=None)), "factor is None"),
    (dict(rope_scaling=7), "rope_scaling"),
    *[({name: 8}, f"{name} = 8") for name in (
        "use_sliding_window mlp_bias attention_dropout pretraining_tp partial_rotary_factor rotary_pct "
        "quantization_config compression_config num_experts num_local_experts n_routed_experts "
        "moe_intermediate_size text_config is_encoder_decoder").split()],
    (dict(hidden_act="gelu"), 'hidden_act = "gelu"'),
    (dict(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
    (dict(rope_parameters=dict(rope_theta=1e6, partial_rotary_factor=0.5)), "partial_rotary_factor"),
    (dict(attention_bias=True), "attention_bias"),
    (dict(hidden_size="48"), "hidden_size is '48'"), (dict(vocab_size=0), "vocab_size is 0"),
    (dict(num_hidden_layers=True), "num_hidden_layers is True"),
    (dict(intermediate_size=4.5), "intermediate_size"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings"),
    (dict(num_key_value_heads=3), "multiple of"), (dict(head_dim=15), "head_dim 15 is odd"),
    (dict(rms_norm_eps=math.nan), "rms_norm_eps"), (dict(eos_token_id="2"), "eos_token_id"),
])
def test_config_refuses(tmp_path, changes, words):
    with refused(words, "config.json"):
        config_of(tmp_path, **changes)


def test_eos_ids_are_the_union(tmp_path):
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [5, 7]})
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<|endoftext|>"}})
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {}}, "added_tokens": [
        {"id": 9, "content": "<|endoftext|>"}]})
    assert config_of(tmp_path, eos_token_id=5).eos_token_id == [9, 5, 7]  # the template's first
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<eos>"})
    with pytest.raises(ValueError, match="<eos>"):
        config_of(tmp_path)
    write_json(tmp_path / "tokenizer.json", {"added_tokens": 7, "model": []})
    with pytest.raises(ValueError, match="tokenizer_config.json"):
        config_of(tmp_path)


def random_weights(config, dtype=BF16):
    """{Hugging Face name: tensor} for a config."""
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype)
            for pieces in model.tensor_map(config).values() for name, shape in pieces}


def shard(folder, tensors, files):
    """Writes `tensors` over several files with an index."""
    where = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": where})
    return where


@pytest.mark.parametrize("kind, tied, dtype", [
    ("qwen2", True, BF16), ("qwen3", False, FP32), ("llama", False, torch.float16)])
def test_weights_round_trip(tmp_path, kind, tied, dtype):
    config = config_of(tmp_path, model_type=kind, tie_word_embeddings=tied)
    theirs = random_weights(config, dtype)
    extra = {"lm_head.weight": theirs["model.embed_tokens.weight"].clone()} if tied else {}  # equal: ignored
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = config.inv_freq()
    shard(tmp_path, theirs | extra, ["a-1.safetensors", "a-2.safetensors"])
    (tmp_path / "stray.safetensors").write_bytes(b"never read")
    ours = dict(model.read_tensors(tmp_path, config))
    assert all(t.dtype == dtype for t in ours.values()) and ("head" in ours) == (not tied)
    assert torch.equal(ours["layers.1.qkv"][64:96], theirs["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(ours["layers.1.gate_up"][80:], theirs["model.layers.1.mlp.up_proj.weight"])
    assert ("layers.0.qkv_bias" in ours) == (kind == "qwen2")
    assert ("layers.0.q_norm" in ours) == (kind == "qwen3")
    model.write_tensors(tmp_path / "out", config, ours.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], theirs[name].bfloat16()) for name in theirs)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"]
    assert Config.from_folder(tmp_path / "out") == config


Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
TENSOR_FAULTS = {  # words of the message, and changes of a good set of tensors
    "lm_head.weight differs": lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] + 1},
    "lm_head.weight": lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"},
    "_orig_mod.x": lambda w: {**w, "_orig_mod.x": torch.zeros(2)},
    "F8_E4M3": lambda w: {**w, Q: w[Q].to(fp8.E4M3), Q + "_scale_inv": torch.ones(1, 1)},
    "(32, 48), config.json asks for (64, 48)": lambda w: {**w, Q: w[Q][:32].clone()},
    "F64": lambda w: {**w, Q: w[Q].double()},
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
FILE_FAULTS = {"git lfs pull": lambda data: LFS, "its header describes": lambda data: data[:-100],
               "cut off": lambda data: data[:100], "header too small": lambda data: b""}
INDEX_FAULTS = {"not a file name inside the folder": lambda where: {**where, Q: "../other/a.safetensors"},
                "q_proj": lambda where: {**where, Q: next(f for f in where.values() if f != where[Q])},
                "lacks c.safetensors": lambda where: {**where, Q: "c.safetensors"},
                "weight_map": lambda where: ["a.safetensors"]}


@pytest.mark.parametrize("words", [*TENSOR_FAULTS, *FILE_FAULTS, *INDEX_FAULTS])
def test_weight_faults(tmp_path, words):
    """Named with the file in the call that opens it, before the first tensor is asked for."""
    config, path = config_of(tmp_path, tie_word_embeddings="differs" in words), tmp_path / "a.safetensors"
    weights = TENSOR_FAULTS.get(words, dict)(random_weights(config))
    where = shard(tmp_path, weights, ["a.safetensors", "b.safetensors"])
    write_json(tmp_path / INDEX, {"weight_map": INDEX_FAULTS.get(words, dict)(where)})
    path.write_bytes(FILE_FAULTS.get(words, bytes)(path.read_bytes()))
    with refused(words, str(tmp_path)):
        model.read_tensors(tmp_path, config)


def from_transformers(transformers, folder, family, changes):
    """A random model, written by transformers in BF16 over several files; read back in FP32."""
    rope = {"rope_theta": 5e5, "rope_type": "default"} | changes.get("rope_parameters", {})
    config = getattr(transformers, family + "Config")(
        **{**SIZES, "head_dim": 12, "rope_theta": None, "eos_token_id": 7, "bos_token_id": 1,
           "pad_token_id": None, "initializer_range": 0.3, **changes, "rope_parameters": rope})
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():  # fresh norms and biases are 1 and 0: no drop would show
            if name.endswith(("norm.weight", "bias")):
                p.add_(torch.randn_like(p) * 0.3)
    theirs.to(BF16).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / INDEX).exists()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=FP32).eval()


@pytest.mark.parametrize("family, changes", [
    ("Qwen2", {}),
    ("Qwen3", dict(head_dim=32)),
    ("Qwen3", dict(head_dim=16, tie_word_embeddings=True, num_key_value_heads=1)),
    ("Llama", dict(rope_parameters=LLAMA3)),
    ("Llama", dict(num_key_value_heads=4, head_dim=24, tie_word_embeddings=True)),
])
def test_checkpoints_of_transformers(tmp_path, family, changes):
    """Load, logits, 24 greedy tokens, save, load back."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    theirs = from_transformers(transformers, tmp_path / "in", family, changes)
    ours = Transformer.from_pretrained(tmp_path / "in", "bf16", dtype=FP32)
    tokens = torch.randint(0, 131, (300,))

    def logits(mine, other):
        with torch.no_grad():
            return mine.logits(mine(tokens, [300])), other(tokens[None]).logits[0]
    mine, other = logits(ours, theirs)
    assert (mine - other).abs().max() < 1e-4 * other.abs().max()
    prompts = [tokens[:k].tolist() for k in (1, 40)]
    sampled = Sampler(ours).generate(prompts, 1, 24, temperature=0, stop=[]).tokens
    for prompt, completion in zip(prompts, sampled):
        options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
        greedy = theirs.generate(torch.tensor([prompt]), **options)[0].tolist()
        assert greedy[len(prompt):] == completion
    ours.save_pretrained(tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    again, info = load(tmp_path / "out", dtype=FP32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine, other = logits(Transformer.from_pretrained(tmp_path / "out", "bf16", dtype=FP32), again)
    assert (mine - other).abs().max() < 1e-4 * other.abs().max()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_logits_in_bf16(tmp_path, kind):
    """BF16 rounds elsewhere than transformers does, yet the logits point the same way; FP8 not much off."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = tiny_config(model_type=kind, hidden_size=256, intermediate_size=384, head_dim=64, vocab_size=260)
    scale_up(Transformer(config), 2.0).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32)
    tokens = torch.randint(0, 260, (200,))
    with torch.no_grad():
        other = theirs(tokens[None]).logits[0]
        for precision, least in (("bf16", 0.999), ("fp8", 0.99)):
            ours = Transformer.from_pretrained(tmp_path, precision, DEVICE)
            mine = ours.logits(ours(tokens.to(DEVICE), [200])).cpu()
            assert torch.cosine_similarity(mine.flatten(), other.flatten(), 0) > least, precision


def test_models_refuse_what_they_cannot_compute(tmp_path):
    with pytest.raises(ValueError, match="float16.*overflow"):
        Transformer(tiny_config(), "bf16", dtype=torch.float16)
    with pytest.raises(ValueError, match="eos_token_id 131 .*beyond vocab_size 131"):
        tiny_config(eos_token_id=[5, 131])
    policy = Transformer(tiny_config(num_hidden_layers=1, max_position_embeddings=64), "bf16")
    with pytest.raises(ValueError, match="65 tokens, the model takes 64"):
        policy(torch.zeros(70, dtype=torch.int64), [5, 65])
    huge = dict(hidden_size=2**40, intermediate_size=2**40)
    write_json(tmp_path / "config.json", {**tiny_config().to_dict(), **huge})
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        # Before memory is taken: it fits nowhere.
        Transformer.from_pretrained(tmp_path)


def test_folder_from_name(tmp_path, monkeypatch):
    assert model.folder_from_name(str(tmp_path)) == str(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    for name, fault, words in [("Some/Model", FileNotFoundError, "hf download Some/Model --local-dir Model"),
                               (str(tmp_path / "nowhere"), FileNotFoundError, "no folder"),
                               (str(tmp_path / "file"), ValueError, "is a file")]:
        with pytest.raises(fault, match=words):
            model.folder_from_name(name)

    def download(name, allow_patterns):
        if name == "Some/Missing":
            raise OSError("404 Client Error\nlong text")
        return "downloaded"
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert model.folder_from_name("Some/Model") == "downloaded"
    with pytest.raises(FileNotFoundError, match=r"404 Client Error\):\n.*hf download Some/Missing") as error:
        model.folder_from_name("Some/Missing")
    assert "long text" not in str(error.value)


# ---- tokenizer ---------------------------------------------------------------------------------------------

QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CORPUS = 3 * [
    "the quick brown fox jumps over the lazy dog. don't DON'T I'll we've he's",
    "for i in range(10):\n\n\treturn x", "1234567 + 89 = 1234656, 3.14159; (a+b)*c == d != e",
    "naïve café Ünïcödé ångström 日本語のテスト 한글 😊👍🏽", "   spaces    and\ttabs  \r\n and lines\n\n\n",
    "banana bandana ababab aaaa mississippi === --- ###"]
STRINGS = [
    "", " ", "\n\n\n", "a\rb", "foo   \n   bar", "\tif x:\n\t\treturn 1\n", "wide\u3000space", " " * 100,
    "line\u2028sep", "don't DON'T don\u2019t 's 't 'LL \u0130'S",
    "1,234,567.89 \u0661\u0662 \u00bd \u2167 5 \t5",
    "A\u030a \u212b \u00c5", "\u1112\u1161\u11ab", "a\u0323\u0307 a\u0307\u0323", "👍🏽 🇫🇷 1\ufe0f\u20e3",
    "\x00nul\x01\x7f\x85\xa0", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", "<|im_end|",
    "<think>x</think>", "<thinking>", "<|im_start|>\u0301e\u0301", "e\u0301<think>\u0301", "ab" * 300,
    "カ\u3099ス ガス", "\u0e01" * 40, "a" * 257, "\ufeffbom", "caf\u00e9!cafe\u0301", "x" * 5 + " " * 7 + "42"]


def random_strings(n):
    """Assigned characters, runs, marks (of blocks as old as the library's tables) and special tokens."""
    rng = random.Random(0)
    chars = [c for c in map(chr, range(0x3400)) if unicodedata.category(c) not in ("Cn", "Mn", "Mc", "Me")]
    pools = [chars, list(map(chr, range(0x300, 0x345))), list(" \t\n\r'0123456789"),
             list(map(chr, range(33, 127))),
             [*STRINGS, "<|im_start|>", "<|endoftext|>", "<think>", "カ\u3099ス", " the"]]
    for _ in range(n):
        yield "".join(rng.choice(pool) * rng.choice([1, 1, 1, 4])
                      for pool in rng.choices(pools, k=rng.randint(1, 12)))


def trained_tokenizer(folder, split="qwen"):
    """A small BPE trained here, with the pre-tokenizer of a family -> the file as tokenizers reads it."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt2", "digits"))
    first = {"qwen": lambda: pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
             "llama": lambda: pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated"),
             "digits": lambda: pre_tokenizers.Digits(individual_digits=True)}.get(split)
    t = tokenizers.Tokenizer(models.BPE(ignore_merges=split == "llama"))
    t.pre_tokenizer = pre_tokenizers.Sequence([first(), level]) if first else level
    t.normalizer = normalizers.NFC() if split in ("qwen", "gpt2") else None
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=460, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False),
                  AddedToken("ガス", normalized=True), AddedToken("<thinking>", normalized=True)])
    t.save(str(folder / "tokenizer.json"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    if split == "llama":  # merges as strings, and ids that do not follow them
        raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
        ids = list(raw["model"]["vocab"].values())
        random.Random(0).shuffle(ids)
        raw["model"]["vocab"] = dict(zip(raw["model"]["vocab"], ids))
    write_json(folder / "tokenizer.json", raw)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def assert_equal_ids(ours, theirs, strings):
    for text in strings:
        for parse_special in (True, False):
            theirs.encode_special_tokens = not parse_special
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, parse_special) == expected, (text, parse_special)
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=False), text


@pytest.mark.parametrize("split", ["qwen", "llama", "gpt2", "digits", "none"])
def test_tokenizer_equals_tokenizers(tmp_path, split, monkeypatch):
    theirs = trained_tokenizer(tmp_path, split)
    monkeypatch.setattr(socket, "socket", None)  # nothing goes online
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.eos_ids == [theirs.token_to_id("<|im_end|>")] and ours.vocab_size == theirs.get_vocab_size()
    assert_equal_ids(ours, theirs, [*STRINGS, *CORPUS, *random_strings(1500)])


@pytest.mark.parametrize("path, value, words", [
    (["model", "type"], "Unigram", "type = 'Unigram'"), (["model", "dropout"], 0.1, "dropout"),
    (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix"),
    (["model", "vocab"], [], "byte-level BPE"), (["model", "merges"], [["q", "zz"]], "merge"),
    (["model", "merges"], [["t", "h", "e"]], "merge"), (["decoder"], {"type": "Metaspace"}, "decoder"),
    (["normalizer"], {"type": "NFKC"}, "NFKC"), (["normalizer"], {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}]}, "Lowercase"),
    (["pre_tokenizer"], {"type": "Whitespace"}, "pre_tokenizer"),
    (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "pre_tokenizer"),
    (["pre_tokenizer", "pretokenizers", 0, "invert"], True, "pre_tokenizer"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"String": " "}, "pre_tokenizer"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": r"\h+"}, r"\h"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": r"(a"}, "split pattern"),
    (["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True, "pre_tokenizer"),
    *[(["added_tokens", 0, name], True, name) for name in ("lstrip", "rstrip", "single_word")],
])
def test_tokenizer_refuses(tmp_path, path, value, words):
    trained_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    write_json(tmp_path / "tokenizer.json", raw)
    (tmp_path / "tokenizer_config.json").unlink()
    with refused(words, "tokenizer.json"):
        Tokenizer.from_pretrained(tmp_path)


JUNK = [None, True, False, 0, -1, 2**70, 1.5, math.nan, math.inf, "", "x", "ab", [], [1], ["x"], {}, {"a": 1},
        {"type": "NFC"}, {"rope_type": ["x"]}, {"rope_theta": "x"}, ["a", "b"], "\ud800"]


def spoiled(at, rng):
    """The JSON value with one node in it replaced or removed, mostly a leaf."""
    key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    if at[key] and isinstance(at[key], (dict, list)) and rng.random() > 0.2:
        spoiled(at[key], rng)
    elif rng.random() < 0.3:
        del at[key]
    else:
        at[key] = rng.choice(JUNK)
    return at


@cpu_only
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_with_random_faults(tmp_path, name):
    """Refused in a line or two that name the file, or read; never another exception."""
    config_of(tmp_path, num_hidden_layers=1, layer_types=["full_attention"], rope_scaling=LLAMA3,
              rope_parameters={"rope_theta": 1e6}, eos_token_id=[3], **dict.fromkeys(model.INERT))
    raw = Tokenizer.bytes().files["tokenizer.json"] | {"normalizer": {"type": "NFC"}}
    raw["model"]["vocab"] |= {"ab": 260, "abc": 261}
    raw["model"]["merges"] = [["a", "b"], ["ab", "c"]]
    write_json(tmp_path / "tokenizer.json", raw)
    read = {"config.json": lambda: Config.from_folder(tmp_path).inv_freq(),
            "tokenizer.json": lambda: Tokenizer.from_pretrained(tmp_path).encode("abc é<|user|>")}[name]
    rng, path, refused = random.Random(0), tmp_path / name, 0
    good = path.read_text()
    for _ in range(300):
        write_json(path, spoiled(json.loads(good), rng))
        try:
            read()
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error) and str(error).count("\n") < 2, error
    assert 50 < refused < 300


def test_merges_that_tiktoken_cannot_represent():
    """"abc" is listed as ab + c, but b + c merges before a + b: tokenizers never makes it, tiktoken would."""
    base = {char: byte for byte, char in enumerate(model.BYTE_TO_CHAR)}
    unreachable = {"vocab": base | {"bc": 256, "ab": 257, "abc": 258},
                   "merges": [["b", "c"], ["a", "b"], ["ab", "c"]]}
    with pytest.raises(ValueError, match="'abc'"):
        model._read_merges(unreachable, "tokenizer.json")
    repeated = {"vocab": base | {"aa": 256, "aaa": 257}, "merges": [["a", "a"], ["a", "aa"]]}
    with pytest.raises(ValueError, match="'aaa'"):  # it is aa|a: the left of two equal merges wins
        model._read_merges(repeated, "tokenizer.json")


def test_text_that_a_tokenizer_cannot_take():
    lacks, splits = (Tokenizer.bytes().files["tokenizer.json"] for _ in range(2))
    lacks["pre_tokenizer"]["use_regex"] = False
    lacks["model"]["vocab"] = {c: i for c, i in lacks["model"]["vocab"].items() if i != 4}
    words = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False}
    splits["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [words, splits["pre_tokenizer"]]}
    for raw, bad, message in ((lacks, "ab\x04", r"'\\x04'"), (splits, "a b", "split pattern")):
        tokenizer = Tokenizer({"tokenizer.json": raw}, [])
        assert tokenizer.encode("ab") == [97, 98]
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(bad)


def test_bytes_tokenizer(tmp_path):
    tokenizer = Tokenizer.bytes()
    assert tokenizer.vocab_size == 260 and tokenizer.eos_ids == [256]
    assert tokenizer.encode("hé<|endoftext|>") == [*"hé".encode(), 256]
    assert tokenizer.encode("<|endoftext|>", parse_special=False) == list(b"<|endoftext|>")
    assert tokenizer.encode("\ud800x\ud83d\ude0a") == list("\ufffdx😊".encode())
    assert tokenizer.decode([104, 0xC3, 300, 256]) == "h\ufffd<|endoftext|>"
    chat = tokenizer.chat([{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"},
                           {"role": "user", "content": "<"}])
    assert chat == [258, *b"1+1", 259, *b"2", 256, 258, *b"<", 259]
    tokenizer.save(tmp_path)
    again, strings = Tokenizer.from_pretrained(tmp_path), [*STRINGS, *random_strings(300)]
    assert again.eos_ids == [256] and again.files == tokenizer.files
    assert all(again.encode(s) == tokenizer.encode(s) and again.decode(again.encode(s)) == s for s in strings)
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    assert_equal_ids(again, tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), strings)


CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
BOS_TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m.role not in ['user', 'assistant'] %}
        {{ raise_exception('no role ' + m.role) }}
    {% endif %}
{{ m | tojson }}{% if loop.index > 1 %}{% break %}{% endif %}
{% endfor %}{{ tools is none }}"""
CHATS = [[{"role": "user", "content": "<b>1 + 1 & \"é\"</b>"}],
         [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "c"},
          {"role": "user", "content": "d"}]]


@pytest.mark.parametrize("place, template", [("config", CHATML), ("list", BOS_TEMPLATE), ("file", CHATML)])
def test_chat_equals_transformers(tmp_path, place, template):
    trained_tokenizer(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                "bos_token": "<|endoftext|>"}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match="chat_template.jinja is not UTF-8"):
            Tokenizer.from_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "the file comes first"
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
        settings["chat_template"] = template if place == "config" else named
    write_json(tmp_path / "tokenizer_config.json", settings)
    ours = Tokenizer.from_pretrained(tmp_path)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages, thinking in itertools.product(CHATS, (None, True, False)):
        extra = {} if thinking is None else {"enable_thinking": thinking}
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
        assert ours.render(messages, thinking) == text
        assert ours.chat(messages, thinking) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template, words", [
    (None, "no chat template"), ([{"name": "other", "template": ""}], "no chat template"),
    ("{% for %}", "failed"), ("{{ raise_exception('not so') }}", "not so"), ("{{ 1 // 0 }}", "failed"),
    ("{{ messages.append(1) }}", "failed"), ("{{ ''.__class__.__mro__ }}", "failed"),
    ("{{ nothing.x }}", "failed"), ("{{ messages[0].content + 1 }}", "failed"),
    ("{{ '%d' % 'x' }}", "failed"), ("{% for i in range(10**9) %}{% endfor %}", "failed"),
    ("{{ messages[0].content.encode('ascii') }}", "failed")])
def test_chat_template_faults(template, words):
    files = Tokenizer.bytes().files
    files["tokenizer_config.json"]["chat_template"] = template
    with pytest.raises(ValueError, match=words):
        Tokenizer(files, [256]).chat(CHATS[0])


# ============================================================================================================
# 5  Tasks, reward, loss
# ============================================================================================================

# (gold, completions that earn 1, completions that earn 0)
ANSWERS = [
    # where the answer is
    ("42", ["7 * 6 = 42\n#### 42", r"Hence \boxed{42}.", "#### 42\r\nDone.", "####42",
     "#### 41\n#### 42\nok", "\\boxed{42}\n#### 41", r"\boxed{42} \boxed{4", r"\fbox{42}", r"\boxed {42}",
     r"\boxed{\boxed{42}}", r"\boxed{1 \boxed{42}", r"} { \boxed{42} {", r"\\boxed{42}"],
     ["the answer is 42", "", " #### 42", "#### 42\n####", "#### 42\n\\boxed{41}",
     r"\boxed{42} no, \boxed{41}", r"\boxed{}", r"\boxed{42", r"\boxed 42", r"\boxed{42} and \boxed{}"]),
    ("6", [], ["1 2 3 4 5 6"]), (r"\{1\}", [r"\boxed{\{1\}}"], []),
    # think blocks
    ("42", [r"<think>\boxed{41}</think>\boxed{42}", "hm</think>\n#### 42",
     r"\boxed{42}<think>\boxed{41}</think>", r"<think><think></think>\boxed{42}"],
     [r"<think>\boxed{42}</think> 42", r"<think>\boxed{42}", r"\boxed{42}<think>hm",
     r"hm \boxed{42}</think>", r"\boxed{42}<think></think> hm</think>"]),
    # numbers
    ("1234", [r"\boxed{1,234}", r"\boxed{1,\!234}"], [r"\boxed{12,34}", r"\boxed{1 234}"]),
    ("1,234", [r"\boxed{1234}"], []), ("123456", [], [r"\boxed{1,234,56}"]),
    ("123", [], [r"\boxed{0,123}"]), ("1234567", [r"\boxed{1\,234{,}567}"], []),
    ("1,234.5", [r"\boxed{1234.50}"], []),
    ("42", [r"\boxed{042}", r"\boxed{42.}", r"\boxed{+42}"], [r"\boxed{42.5}", r"\boxed{420}",
     r"\boxed{\pm 42}", r"\boxed{--42}", "\\boxed{\uff14\uff12}", r"\boxed{0x2a}", r"\boxed{4_2}"]),
    ("1/2", [r"\boxed{.5}"], []), ("0", [r"\boxed{-0}"], [r"\boxed{-}", r"\boxed{nan}"]),
    ("-42", ["\\boxed{\u221242}", "#### - 42", "#### -$42", "#### $-42"], [r"\boxed{42}"]),
    ("18446744073709551616", [], [r"\boxed{18446744073709551617}"]), ("10", [], [r"\boxed{10^{10^{10}}}"]),
    # money, units, marks
    ("42", ["#### $42", r"\boxed{\$42.00}", r"\boxed{42 €}", "#### **42**", "#### $42$.", r"\boxed{\(42\)}",
     r"\boxed{42\%}", r"\boxed{42^{\circ}}", "\\boxed{42\u00b0}", r"\boxed{42 \text{ m}^2}",
     r"\boxed{42\,\mathrm{cm}}", "#### 42 miles per hour", "#### 42 km/h", r"\boxed{\text{42}}"],
     [r"\boxed{42x}", r"\boxed{42 x}", r"\boxed{42 pi}", r"\boxed{42!}", "#### 42 thousand",
     r"\boxed{41 \text{ or } 42}", r"\boxed{41, 42}", "#### 42 and a half", r"\boxed{40+2}"]),
    (r"42\%", [], [r"\boxed{0.42}"]), ("40", [], [r"\boxed{4e1}"]),
    # fractions
    ("0.75", [r"\boxed{\frac34}", r"\boxed{\dfrac 3 4}", r"\boxed{\frac{\frac{3}{2}}{2}}"], []),
    (r"-\tfrac{3}{4}", [r"\boxed{-6/8}", r"\boxed{\frac{-3}{4}}", r"\boxed{-0.75}"], []),
    ("0.3333333333333333", [], [r"\boxed{\frac{1}{3}}"]), ("-7/4", [r"\boxed{-1\frac34}"], []),
    ("1.75", [r"\boxed{1 3/4}"], []), ("1", [], [r"\boxed{1 3/4}"]), ("7/3", [], [r"\boxed{1\frac43}"]),
    ("3", [], [r"\boxed{3/0}"]), ("0", [], [r"\boxed{\frac{0}{0}}"]), ("1/4", [], [r"\boxed{1/2/2}"]),
    ("250", [r"\boxed{\frac{1,000}{4}}"], []), (r"\frac{1}{3^{98}}", [], [r"\boxed{\frac{1}{3^{99}}}"]),
    # text
    ("Ada", [r"\boxed{\text{Ada}}"], []), (r"\text{Ada}", ["#### Ada"], []), ("Adam", [], [r"\boxed{Ada}"]),
    ("y^3-1", [r"\boxed{y^{3} - 1}"], []), ("y^31", [], [r"\boxed{y^{31}}"]),
    (r"\sqrt3", [r"\boxed{\sqrt{3}}"], []), (r"[0,\frac{1}{2})", [r"\boxed{\left[0, \dfrac12\right)}"], []),
    ("", [], [r"\boxed{ }", "#### "]),
    # beyond MAX_DIGITS the digits are compared; leading and trailing zeros still do not count
    ("7" * 9000, [r"\boxed{" + "7" * 9000 + "}"], []), ("7" * 8999 + "8", [], ["#### " + "7" * 9000]),
    ("-0" + "7" * 9000, ["#### -" + "7" * 9000 + ".000 km"], []), ("5", ["#### " + "0" * 9000 + "5"], []),
    ("1", [], [r"\boxed{" + r"\frac{" * 5000 + "1" + "}{1}" * 5000 + "}"]),
]


@pytest.mark.parametrize("gold, right, wrong", ANSWERS, ids=[str(i) for i in range(len(ANSWERS))])
def test_math_reward(gold, right, wrong):
    for reward, completions in (1, right), (0, wrong):
        for completion in completions:
            assert grpo.math_reward(completion, gold) == reward, completion[:99]


HOSTILE = [
    "\\boxed{", "{", "}", "{}", "\\frac{", "\\frac", " ", "\t", "\n", "####", "\n#### ", "1,", "123,", "1",
    "0", ".", "1/", "-", "$", "*", "<think>", "</think>", "<think></think>", "\\text{", "\\text", "\\",
    "\\\\", "\U0001f600", "\\boxed{\\boxed", "\\boxed{1}", "\\boxed  ", "a ", "\u2009", "=", "(", "\x00",
    "\ud800", "^{", "+",
]


@cpu_only
def test_reward_time_is_linear():
    """Eight times the length of any hostile string takes about 8 times as long; quadratic code takes 64."""
    for unit in HOSTILE:
        for frame in ("%s", "\\boxed{%s}", "#### 1%sx", "<think>%s</think>\n#### 1"):
            took = []
            for length in (2_000, 16_000):
                text = frame.replace("%s", unit * (length // len(unit)))
                best = math.inf
                for _ in range(2):
                    start = time.process_time()  # not the clock: the machine may have other work
                    grpo.math_reward(text, "1")
                    grpo.countdown_reward(text, "1: 1")
                    best = min(best, time.process_time() - start)
                took.append(best)
            assert took[1] < 24 * took[0] + 0.02, (unit, frame, took)


def test_reward_never_raises_or_pays_noise():
    rng = random.Random(0)
    parts = HOSTILE + ["\\boxed{", "}", "7", "8", "\\,", "\\times", "or", "%", "\\frac", "{1}", "x^2"]
    paid = 0
    for _ in range(10_000):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 25)))
        paid += grpo.math_reward(text, "18")
        assert grpo.countdown_reward(text, "18: 2 9") == 0
        grpo.math_reward(text, text)  # hostile golds as well
        grpo.math_reward("\\boxed{" + text + "}", "#### " + text)
    assert paid == 0


@pytest.mark.parametrize("name, options", [
    ("sum", {}), ("sum", {"difficulty": 2, "digits": 1}), ("sum", {"difficulty": 60, "digits": 5}),
    ("countdown", {}), ("countdown", {"difficulty": 2}), ("countdown", {"difficulty": 8}),
])
def test_generated_tasks(name, options):
    task, again, other = (grpo.TASKS[name](seed=seed, **options) for seed in (1, 1, 2))
    order = random.Random(0).sample(range(200), 200)  # example i depends on i, not on what was asked before
    shuffled = {i: again.train(i) for i in order}
    examples, others = [task.train(i) for i in range(200)], [other.train(i) for i in range(1000)]
    assert examples == [shuffled[i] for i in range(200)] != others[:200] and task.heldout == other.heldout
    held = {example.prompt for example in task.heldout}
    assert 0 < len(held) == len(task.heldout) <= 256
    assert not held & {example.prompt for example in examples + others}
    hasty = 0
    for example in examples + task.heldout:
        assert example.reward(example.prompt) == 0
        if "\n" not in example.solution and name == "sum":  # an estimate without steps, as a rule wrong
            assert example.reward(f"#### {example.gold}") == 1
            hasty += 1
        else:
            assert example.reward(example.solution) == 1 == example.reward(example.prompt + example.solution)
            assert example.reward(example.solution[:-1]) == 0
    assert abs(hasty / len(examples + task.heldout) - grpo.Sum.HASTY * (name == "sum")) < 0.12


def test_first_examples_do_not_change(monkeypatch):
    """Seeds are part of every published number: these are fixed for good, on any machine."""
    assert grpo.Countdown(heldout=1).train(0).solution == "89-62=27\n44+27=71\n#### 44+(89-62)"
    assert grpo.Sum(heldout=1).train(0).prompt == "53+71+98+59="
    monkeypatch.setattr(grpo.Sum, "HASTY", 0.0)
    assert grpo.Sum(heldout=1).train(0).solution == "53+71=124\n124+98=222\n222+59=281\n#### 281"


@pytest.mark.parametrize("answer, reward", [
    ("2*(3+4)", 1), ("(4+3)*2", 1), ("\\boxed{2 * (3+4)}", 1), ("2*3+2*4", 0), ("14", 0),
    ("2*7", 0), ("2*(3+4) = 14", 0), ("2*(3+4)+0", 0), ("2*(3+4)*1", 0), ("2*(3+4)-(3-3)", 0), ("2(3+4)", 0),
    ("2**3+4+2", 0), ("9**9**9**9**9", 0), ("(" * 70 + "2*(3+4)" + ")" * 70, 1), ("(" * 150, 0),
    ("(" * 5000 + "1" + ")" * 5000, 0), ("-" * 149 + "1", 0), ("2*(3+4)//1", 0), ("2*(3+4)/0", 0),
    ("2/(3-3)", 0), ("a*(3+4)", 0), ("int('14')", 0), ("1e1+4", 0), ("9" * 10_000, 0), ("\uff12*(3+4)", 0),
    ("-2*(-3-4)", 0), ("\u0662*(3+4)", 0), ("02*(3+4)", 0), ("2.0*(3+4)", 0), ("2*(3+4)#x", 0), ("", 0),
    ("1_4", 0), ("__import__('os').abort()", 0), ("2*(3+4", 0), ("2*(3+4)\x00", 0)])
def test_countdown_reward(answer, reward):
    completion = answer if "boxed" in answer else f"so\n#### {answer}"
    assert grpo.countdown_reward(completion, "14: 2 3 4") == reward


def write(path, *lines, newline=b"\n", start=b""):
    path.write_bytes(start + newline.join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def row(question, answer):
    return json.dumps({"question": question, "answer": answer})


GOOD = '{"question": "6 * 7?", "answer": "6*7=<<6*7=42>>42\\n#### 1,042"}'


def test_jsonl(tmp_path):
    plain = '{"question": "Who?", "answer": "Ada", "id": 1, "id": 2}'
    path = write(tmp_path / "a.jsonl", GOOD, "", plain)
    first, second = grpo.load_jsonl(path)
    assert first.gold == "1,042" and first.solution == "6*7=42\n#### 1,042" and first.reward("#### 1042") == 1
    assert first.prompt == f"6 * 7?\n{grpo.INSTRUCTION}\n" and '"#### "' in first.prompt
    assert second.gold == "Ada" and second.solution is None and second.reward("#### Ada") == 1
    for newline in (b"\r\n", b"\r"):
        assert grpo.load_jsonl(write(tmp_path / "b.jsonl", GOOD, plain, newline=newline)) == [first, second]
    assert grpo.load_jsonl(write(tmp_path / "b.jsonl", GOOD, start=b"\xef\xbb\xbf")) == [first]
    odd = '{"question": "a\u2028b\u0085c", "answer": "#### 1"}'  # no ends of a line, but for str.splitlines
    assert grpo.load_jsonl(write(tmp_path / "b.jsonl", odd))[0].gold == "1"


@pytest.mark.parametrize("line, message", [
    ('{"question": "x"}', '"answer" is missing'), ('{"answer": "x"}', '"question" is missing'),
    ('{"question": "x", "answer": "7"} {}', "not JSON"), ("[" * 100_000, "not JSON"), ("[1]", "found list"),
    ('{"question": "x", "answer": 7}', '"answer" must be text'),
    ('{"question": " ", "answer": "7"}', "not blank"),
    (b'{"question": "\xff", "answer": "7"}', "not JSON in UTF-8"),
    ('{"question": "x", "answer": "so\\n####"}', "no gold answer"),
    ('{"question": "x", "answer": "a\\nb"}', "no gold answer")])
def test_jsonl_faults_name_the_line(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", GOOD, "", line, GOOD)
    with refused(f"{path}, line 3: ", message):
        grpo.load_jsonl(path)


def test_jsonl_file_faults(tmp_path):
    with pytest.raises(FileNotFoundError, match="curl -Lo"):
        grpo.load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no examples"):
        grpo.load_jsonl(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(ValueError, match="all 1 rows are held out"):
        grpo.JsonLines(write(tmp_path / "one.jsonl", GOOD))


def test_jsonl_task(tmp_path):
    rows = [f'{{"question": "q{i}", "answer": "#### {i}"}}' for i in range(40)]
    path = write(tmp_path / "a.jsonl", *rows)
    task, again = grpo.TASKS["jsonl"](path, seed=3), grpo.TASKS["jsonl"](path, seed=3)
    assert len(task.heldout) == 4 and len(task.rows) == 36
    epochs = [[task.train(36 * epoch + i) for i in range(36)] for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(e.gold for e in epochs[0]) == sorted(e.gold for e in epochs[1])
    assert [again.train(i) for i in reversed(range(72))][::-1] == epochs[0] + epochs[1]
    leak = grpo.JsonLines(path, write(tmp_path / "b.jsonl", *rows[:8]), heldout=5)
    assert len(leak.heldout) == 5 and len(leak.rows) == 35  # rows of the held-out set leave the training set


def test_advantages():
    got = grpo.advantages([1, 0, 0, 0, 1, 1, 0, 0], 4)
    assert got.dtype == FP32 and got.tolist() == [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
    for value in (0.1, 1 / 3, 1e-30, 1e30, -7.7):  # exactly zero, with the division too
        for normalize_std in (False, True):
            assert not grpo.advantages(torch.full((21,), value), 7, normalize_std).any()
    scaled = grpo.advantages([1, 0, 0, 0], 4, normalize_std=True)
    assert torch.allclose(scaled, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-4)
    assert grpo.advantages([], 4).shape == (0,)
    failed = grpo.advantages([1, math.nan, 0, math.inf], 4)  # a score that failed counts as 0
    assert torch.equal(failed, grpo.advantages([1, 0, 0, 0], 4))
    for rewards, size, words in (([1, 0], 1, "group_size=1"), ([1, 0, 0], 2, "groups of 2"),
                                 ([[1, 0], [0, 0]], 2, "groups of 2")):
        with pytest.raises(ValueError, match=words):
            grpo.advantages(rewards, size)


def leaf(*values):
    return torch.tensor(values, dtype=FP32, requires_grad=True)


def test_policy_loss_by_hand():
    """Both sides of the clip, either sign: the gradient is -advantage * ratio / total, or 0 where clipped."""
    ratios, adv = [1.0, 1.1, 1.5, 1.5, 0.5, 0.5, 0.9], [2.0, -1.0, 3.0, -3.0, 3.0, -3.0, 0.0]
    old = torch.full((7,), -2.0)
    logp = (old + torch.tensor(ratios).log()).requires_grad_()
    loss, sums = grpo.policy_loss(logp, old, torch.tensor(adv), 10)
    loss.backward()
    gains = [2, -1.1, 3 * 1.28, -4.5, 1.5, -3 * 0.8, 0]
    grads = [2, -1.1, 0, -4.5, 1.5, 0, 0]
    assert loss.item() == pytest.approx(-sum(gains) / 10, rel=1e-5)
    assert torch.allclose(logp.grad, -torch.tensor(grads) / 10, rtol=1e-5)
    assert sums["clipped_low"] == 1 and sums["clipped_high"] == 1 and "kl" not in sums
    expected = {"ratio": sum(ratios), "loss": -sum(gains), "entropy": -logp.sum().item()}
    assert {name: sums[name].item() for name in expected} == pytest.approx(expected, rel=1e-5)
    x = torch.zeros(0, requires_grad=True)
    loss, sums = grpo.policy_loss(x, x, x, 0, ref_logp=x, kl_coef=1.0)  # all completions were dropped
    loss.backward()
    assert loss == 0 and x.grad.shape == (0,) and all(value == 0 for value in sums.values())
    metrics = grpo.Metrics()
    metrics.add(0, sums)
    assert set(map(float, metrics.sums.values())) == {0.0}


def test_mean_over_completions():
    """share: each completion's mean counts the same, whatever its length; the KL term is weighed along."""
    lengths, adv = torch.tensor([1, 4, 2]), torch.tensor([1.0, -2.0, 3.0])
    logp, ref, each = leaf(*range(-7, 0)), torch.zeros(7), adv.repeat_interleave(lengths)
    share = grpo.mean_share(lengths, 7, 3)
    loss, sums = grpo.policy_loss(logp, logp, each, 7, share=share, ref_logp=ref, kl_coef=0.5)
    tokens = -each + 0.5 * grpo.k3(logp.detach(), ref)
    assert loss.item() == pytest.approx(sum(part.mean().item() for part in tokens.split([1, 4, 2])) / 3)
    assert sums["loss"].item() / 7 == pytest.approx(loss.item())
    whole = grpo.mean_share(torch.tensor([3, 3]), 6, 2)
    assert whole.tolist() == [1.0] * 6, "equal lengths: both means are one"


def test_truncated_weights():
    old, sampler = leaf(-1, -1, -1, 0), torch.tensor([-1.0, -2.0, -0.5, -200.0])
    weights = grpo.truncated_weights(old, sampler, 2.0)
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, math.exp(-0.5), 2.0]))
    assert not weights.requires_grad
    logp, adv = leaf(-1, -1, -1, 0), torch.ones(4)
    grpo.policy_loss(logp, old, adv, 4, weights=weights)[0].backward()
    assert torch.allclose(logp.grad, -weights / 4) and old.grad is None


def test_policy_loss_stays_finite():
    for gap in (100.0, -1e4):
        logp = leaf(gap / 2, gap / 2)
        loss, _ = grpo.policy_loss(logp, -logp.detach(), torch.tensor([1.0, -1.0]), 2)
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all()
    logp = leaf(math.nan, -1)  # a fault of the model is not hidden
    assert grpo.policy_loss(logp, torch.zeros(2), torch.ones(2), 2)[0].isnan()
    with pytest.raises(ValueError, match=r"advantage \(2, 1\)"):
        grpo.policy_loss(leaf(0, 0), torch.zeros(2), torch.zeros(2, 1), 2)


@pytest.mark.parametrize("gap", [0.0, 1e-3, 1.0, 10.0, 50.0, -1.0, -100.0, 1e30, -1e30])
def test_kl(gap):
    logp, ref = leaf(0), torch.tensor([gap])
    loss, sums = grpo.policy_loss(logp, torch.zeros(1), torch.zeros(1), 1, ref_logp=ref, kl_coef=0.5)
    loss.backward()
    assert sums["kl"].isfinite() and logp.grad.isfinite() and sums["kl"] >= 0
    if gap <= 10:  # the estimate as it is written, pulling towards the reference; bounded beyond 20 only
        assert sums["kl"].item() == pytest.approx(math.expm1(gap) - gap, rel=1e-3)
        assert logp.grad.item() == pytest.approx(-math.expm1(gap) / 2, rel=1e-3)
        assert loss.item() == pytest.approx(sums["kl"].item() / 2)


def test_mismatch():
    sampler = -torch.rand(1000)
    for same_tokens in (sampler, sampler[:0]):
        assert all(x.shape == () and x == 0 for x in grpo.mismatch(same_tokens, same_tokens.clone()).values())
    trainer = sampler.clone()
    trainer[123] += 0.5
    trainer[900] = torch.nextafter(trainer[900], torch.tensor(1.0))
    d = (trainer - sampler).double()
    expected = {"differing_tokens": 2, "differing": 2e-3, "max_dlogp": 0.5,
                "mean_dlogp": d.abs().mean().item(), "k3": (d.expm1() - d).mean().item()}
    got = {name: value.item() for name, value in grpo.mismatch(sampler, trainer).items()}
    assert got == pytest.approx(expected, rel=1e-4)
    assert grpo.first_difference(sampler, sampler.clone()) is None
    assert grpo.first_difference(sampler, trainer) == 123
    signs = torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, -0.0])
    assert grpo.first_difference(*signs) == 1  # bits, not values


# ============================================================================================================
# 6  The sampler
# ============================================================================================================


@pytest.fixture(scope="module")
def tiny():
    return scale_up(Transformer(tiny_config(num_hidden_layers=1, hidden_size=16, num_attention_heads=1,
                                            num_key_value_heads=1, intermediate_size=16), precision="bf16"))


def step_state(rows, width, steps):
    """ids, spans, table, is_stop and out of `Sampler._build`, filled as in the middle of a rollout."""
    torch.manual_seed(3)
    length = torch.randint(1, width * PAGE, (rows,)) * (torch.rand(rows) < 0.7)              # 0: idle
    end = (length + torch.randint(0, 3, (rows,))).clamp(max=width * PAGE)
    ids = torch.stack([*torch.randint(0, 131, (3, rows)), torch.full((rows,), 2)])
    tensors = (ids, torch.stack([(length - 1).clamp(min=0), length, end]).int(),
               torch.randint(0, 999, (rows, width), dtype=torch.int32), torch.arange(131) % 5 == 0,
               torch.zeros(steps, 2, rows, dtype=torch.int32))
    return [x.to(DEVICE) for x in tensors]


@needs_kernels
def test_kernel_advance():
    """Rows that run on, reach their limit, meet a stop id, were idle: the reference's bits, twice."""
    mine, theirs = step_state(48, 4, 8), step_state(48, 4, 8)
    for seed in range(2):
        token, logprob = torch.randint(0, 131, (40,)).to(DEVICE), torch.randn(40).to(DEVICE)
        rollout.advance(token, logprob, *mine)
        rollout.advance_reference(token, logprob, *theirs)
        for name, a, b in zip(("ids", "spans", "table", "is_stop", "out"), mine, theirs):
            assert torch.equal(a, b), f"{name} after {seed + 1} steps"
    ran = theirs[1][1, :40] > 0
    assert ran.any() and not ran.all()


def test_group_shares_its_prompt(policy):
    prompt = some_prompts([140])[0]
    sampler = Sampler(policy, max_slots=4)
    result = sampler.generate([prompt] * 2, 2, 12, seed=2, stop=[])
    assert result.prefill_tokens == 2 * 139  # once per group, not per sample
    assert len({tuple(t) for t in result.tokens}) == 4  # the samples differ
    alone = [Sampler(policy).generate([prompt], 1, 12, seed=2, stop=[], keys=[k]) for k in range(4)]
    single = [drawn(result)[0] for result in alone]
    assert drawn(result) == single
    assert drawn(Sampler(policy).generate([prompt], 1, 12, seed=3, stop=[]))[0] != single[0]
    narrow = Sampler(policy, max_slots=1).generate([prompt] * 2, 2, 12, seed=2, stop=[])
    assert drawn(narrow) == single and narrow.prefill_tokens == 2 * 139


def test_stop_rules(policy):
    prompts, sampler = some_prompts([4, 9]), Sampler(policy)
    free = sampler.generate(prompts, 1, 12, temperature=0, stop=[])
    assert free.finish == ["length"] * 2 and [len(t) for t in free.tokens] == [12, 12]
    last = free.tokens[1][-1]
    limit = free.tokens[1].index(last) + 1  # the stop id is the last token allowed
    at_limit = sampler.generate(prompts[1:], 1, limit, temperature=0, stop=[last])
    assert (at_limit.tokens, at_limit.finish) == ([free.tokens[1][:limit]], ["stop"])
    one = sampler.generate(prompts, 1, 1, temperature=0, stop=[])
    assert one.tokens == [t[:1] for t in free.tokens] and one.finish == ["length"] * 2
    for stop in set(free.tokens[0]):  # each id of several, the first among them
        got = sampler.generate(prompts[:1], 1, 12, temperature=0, stop=[stop, 130])
        assert got.tokens[0] == free.tokens[0][:free.tokens[0].index(stop) + 1] and got.finish == ["stop"]
        same(got.logprobs[0], free.logprobs[0][:len(got.tokens[0])])


def test_greedy_and_tiny_temperature(tiny):
    prompts = some_prompts([5, 8, 2])
    greedy = Sampler(tiny).generate(prompts, 1, 10, temperature=0, seed=1, stop=[])
    assert greedy.tokens == Sampler(tiny).generate(prompts, 1, 10, temperature=0, seed=2, stop=[]).tokens
    assert greedy.tokens == Sampler(tiny).generate(prompts, 1, 10, temperature=1e-6, seed=2, stop=[]).tokens
    ids = torch.tensor(prompts[1] + greedy.tokens[1])
    with torch.no_grad():
        logprobs = tiny.logits(tiny.forward(ids, [len(ids)])).log_softmax(-1)[7:-1]
    assert greedy.tokens[1] == logprobs.argmax(-1).tolist()
    assert torch.allclose(greedy.logprobs[1], logprobs.amax(-1), atol=1e-5)  # at temperature 1


def test_soak_in_a_pool_that_is_too_small(tiny, monkeypatch):
    """On a GPU 2,000 requests, through graphs of all sizes: nothing lost or repeated, no page kept."""
    monkeypatch.setattr(rollout, "GROWTH_PAGES", 0)  # admits too many: they are sent back again and again
    policy, draw = make_policy("fp8") if CUDA else tiny, random.Random(3)
    count, n, slots, pages, most = by_mode((10, 3, 12, 7, 70), None, (500, 4, 300, 100, 300))
    prompts = some_prompts([draw.choice([1, 2, 30, 64, 65, 100, 200]) for _ in range(count)], seed=3)
    limits = [min(most, 1 + int(40 * math.exp(draw.gauss(0, 1.2)))) for _ in range(count * n)]
    small = Sampler(policy, max_slots=slots, pages=pages)
    result = small.generate(prompts, n, limits, seed=8, stop=[])
    assert [len(tokens) for tokens in result.tokens] == limits and result.n_tokens == sum(limits)
    assert small.pool.free == small.pool.capacity and not any(small.pool.references)
    assert result.preemptions > 3
    assert drawn(result) == drawn(Sampler(policy).generate(prompts, n, limits, seed=8, stop=[]))


@contextlib.contextmanager
def no_waiting():
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_step_never_waits_for_the_gpu(monkeypatch):
    """The steps of a look are launched without a synchronisation; the look itself waits once."""
    policy, launch, looks = make_policy("fp8"), Sampler._launch, []

    def watched(self, steps):
        looks.append(steps)
        with no_waiting():
            launch(self, steps)
    sampler = Sampler(policy, max_slots=8)
    expected = drawn(sampler.generate(PROMPTS, 1, LIMITS, seed=5))   # captures the graphs
    monkeypatch.setattr(Sampler, "_launch", watched)
    assert drawn(sampler.generate(PROMPTS, 1, LIMITS, seed=5)) == expected and len(looks) > 3
    with torch.no_grad(), no_waiting():
        sampler._step(8)


def test_plan_fits_the_memory(monkeypatch):
    """512 sequences of up to 16k tokens of a 1.7B shape, 72 of a card's 80 GB free: what fits, no more."""
    free, planned = 72e9, {}
    monkeypatch.setattr(rollout, "free_memory", lambda device: free)
    monkeypatch.setattr(rollout, "MAX_SLOTS", {"meta": 512})
    monkeypatch.setattr(rollout, "STEPS_PER_LOOK", {"meta": 16})
    build = lambda self, *sizes: planned.update(zip(("slots", "width", "pages"), sizes))
    monkeypatch.setattr(Sampler, "_build", build)
    policy = Transformer(big_config("1.7B"), device="meta", seed=None)
    request = lambda count, limit: [types.SimpleNamespace(end=1000 + limit) for _ in range(count)]
    sampler = Sampler(policy)
    sampler._plan(request(512, 16384))
    page = 28 * 2 * 8 * PAGE * 128 * 2  # bytes: layers, keys and values, heads, places, head size, BF16
    assert planned["slots"] == 512 and planned["width"] * PAGE >= 1000 + 16384
    assert 0.86 * free < planned["pages"] * page < 0.9 * free and sampler._page_bytes() == page
    sampler._plan(request(64, 100))                       # what is needed, where that is less
    assert planned == {"slots": 64, "width": 32, "pages": 64 * 18 * 9 // 8 + 2}
    free = 2e9
    with pytest.raises(ValueError, match="needs 1565 pages of 64 tokens, there are"):
        Sampler(policy)._plan(request(1, 99000))
    assert Sampler(policy, max_slots=7)._plan(request(512, 1000)) is None and planned["slots"] == 7


@cpu_only
def test_smallest_pool_that_is_accepted(tiny):
    """n samples of one page each in a pool of two: the shared page must never block the samples."""
    for length, limit in [(1, 64), (64, 1), (64, 65), (65, 3)]:
        prompt = some_prompts([length])[0]
        pages = rollout.pages_for(length + limit - 1) + 2
        small, large = (Sampler(tiny, max_slots=4, pages=n).generate([prompt] * 2, 2, limit, seed=1, stop=[])
                        for n in (pages, 99))
        assert small.tokens == large.tokens and [len(t) for t in small.tokens] == [limit] * 4
        with pytest.raises(ValueError, match="pages"):
            Sampler(tiny, pages=pages - 1).generate([prompt], 1, limit)


def test_new_weights_take_effect():
    policy = make_policy("fp8", "fp8")
    draw = lambda sampler: drawn(sampler.generate(PROMPTS[:3], 2, 12, seed=1))
    sampler = Sampler(policy)
    before = draw(sampler)
    policy.load([(name, w.full().cpu() * (1 + 0.3 * torch.randn(w.shape)))
                 for name, w in policy.weights().items()])
    after = draw(sampler)
    assert before != after == draw(Sampler(policy))
    sampler.release()
    assert sampler.pool is None and draw(sampler) == after


@cpu_only
def test_requests_of_any_size_one_after_the_other(tiny):
    """The pool grows for a larger request and stays for a smaller one."""
    sampler = Sampler(tiny)
    for lengths, n, limit in [([3], 1, 2), ([100] * 9, 2, 5), ([5], 2, 10), ([300], 1, 9), ([2], 1, 3)]:
        prompts = some_prompts(lengths)
        once = Sampler(tiny).generate(prompts, n, limit, seed=1)
        assert drawn(sampler.generate(prompts, n, limit, seed=1)) == drawn(once)


@pytest.mark.parametrize("change,words", [
    (dict(prompts=[]), "no prompts"), (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1, 131]]), "id 131.*131 ids"), (dict(prompts=[[-1, 5]]), "id -1"),
    (dict(prompts=[[1.5, 5]]), "not a flat list"), (dict(prompts=[[[1], [2]]]), "not a flat list"),
    (dict(prompts=[[1] * 450], max_new_tokens=63), "450 tokens.*513.*512"), (dict(n=0), "n is 0"),
    (dict(max_new_tokens=[1, 2, 3]), "3 entries for 2"), (dict(max_new_tokens=[4, -1]), "completion 1 is -1"),
    (dict(temperature=-1.0), "temperature is -1"), (dict(temperature=math.nan), "temperature is nan"),
    (dict(temperature=math.inf), "temperature is inf"), (dict(temperature=1e-7), "1e-07.*0 is greedy"),
    (dict(stop=[131]), "outside 0..130"), (dict(keys=[1]), "keys has 1 entries for 2"),
    (dict(keys=[1, 2**63]), "64 bits"), (dict(n=10**9), "n is 1000000000"),
])
def test_bad_requests_are_refused(tiny, change, words):
    request = {**dict(prompts=[[1, 2], [3]], n=1, max_new_tokens=4), **change}
    sampler = Sampler(tiny)
    with pytest.raises(ValueError, match=words):
        sampler.generate(**request)
    assert sampler.pool is None  # nothing was allocated


def test_bad_weights_are_named(tiny):
    bad = Transformer(tiny.config, precision="bf16")
    bad.norm.write(torch.full((16,), float("nan")))
    sampler = Sampler(bad)
    with pytest.raises(FloatingPointError, match="completion .*generated token 0 is nan"):
        sampler.generate([[1, 2]], 2, 4)
    bad.norm.write(torch.ones(16))
    assert len(sampler.generate([[1, 2]], 2, 4, stop=[]).tokens[1]) == 4  # the next call starts clean


def test_a_model_on_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    head = types.SimpleNamespace(data=types.SimpleNamespace(device=torch.device("cuda:1")))
    with pytest.raises(ValueError, match="on cuda:1, which is not the current GPU"):
        Sampler(types.SimpleNamespace(head=head))


def test_progress(tiny, capsys, monkeypatch):
    Sampler(tiny, verbose=True).generate([[1, 2, 3]], 1, 8, stop=[])
    assert capsys.readouterr().out == ""  # short rollouts are silent
    monkeypatch.setattr(rollout, "QUIET_SECONDS", 0)
    Sampler(tiny, verbose=True).generate([[1, 2, 3]], 1, 8, stop=[])
    assert "1 of 1 sequences, 8 tokens" in capsys.readouterr().out.splitlines()[-1]


@needs_gpu
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_graphs_give_the_bits_of_eager_steps(precision, monkeypatch):
    policy = make_policy(precision)
    prompts = some_prompts([1, 2, 63, 64, 65, 66, 130, 5] * 3)
    graphs = Sampler(policy)
    expected = drawn(graphs.generate(prompts, 2, 60, seed=1))
    assert graphs.graphs
    small = Sampler(policy, max_slots=5, pages=12)
    assert drawn(small.generate(prompts, 2, 60, seed=1)) == expected

    class Eager:
        def __init__(self, sampler, B):
            self.replay = lambda: sampler._step(B)
    monkeypatch.setattr(Sampler, "_graph", lambda self, B: Eager(self, B))
    assert drawn(Sampler(policy).generate(prompts, 2, 60, seed=1)) == expected


# ============================================================================================================
# 7  Training: runs, resume, checkpoints
# ============================================================================================================

TINY = ("--device=cpu --width=64 --layers=1 --difficulty=2 --digits=1 --sft-steps=2 --sft-batch=8 --steps=2 "
        "--prompts=3 --samples=2 --max-new-tokens=8 --lr=3e-3 --eval-problems=4 --eval-every=2 "
        "--save-every=0 --micro-tokens=64").split()


@pytest.fixture
def paid(monkeypatch):
    """A reward that an untrained model earns half of the time: every step has a gradient."""
    coin = lambda example, completion: float(zlib.crc32(completion.encode()) % 2)
    monkeypatch.setattr(grpo.Example, "reward", coin)


def read_log(out):
    """The records of a run without what the clock says."""
    clock = ("t_", "tok_per_s", "seconds", "mem_gib")
    lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(word in k for word in clock)} for line in lines]


def run(out, *flags):
    """A run in this process -> its records of GRPO steps."""
    train.main([*TINY, f"--out={out}", *flags])
    return [r for r in read_log(out) if r["kind"] == "step"]


SCRIPT = f"""
import os, runpy, signal, sys, zlib
sys.path.insert(0, {str(HERE)!r})
import grpo, rollout
grpo.Example.reward = lambda self, completion: float(zlib.crc32(completion.encode()) % 2)    # as `paid`
HOOK
runpy.run_path({str(HERE / "train.py")!r}, run_name="__main__")
"""


def start(out, *flags, ranks=0, hook=""):
    """The same in a process of its own, or in several under torchrun. `hook`: code to run before it."""
    script = Path(out).with_suffix(".py")
    script.write_text(SCRIPT.replace("HOOK", hook))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] * (ranks > 0)
    return beside(*torchrun, script, *TINY, f"--out={out}", *flags)


def make_run(out, *flags):
    return train.Run(train.parse([*TINY, f"--out={out}", *flags]))


def save_tiny(folder, **changes):
    """A checkpoint with a tokenizer, as --model takes it."""
    sizes = dict(vocab_size=260, max_position_embeddings=1024, eos_token_id=[256])
    Transformer(tiny_config(**sizes | changes)).save_pretrained(folder)
    Tokenizer.bytes().save(folder)


def newest(out):
    return Path(out) / train.checkpoints(out)[-1]


def assert_same_run(a, b):
    assert read_log(a) == read_log(b) and newest(a).name == newest(b).name
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (newest(a) / name).read_bytes() == (newest(b) / name).read_bytes(), name


@pytest.mark.parametrize("precision, states", [*((p, "fp32") for p in model.PRECISIONS), ("fp8", "bf16")])
def test_a_run_and_its_resume(tmp_path, paid, precision, states, capsys):
    """Four steps in a row, and two, then two more: the same bits in weights, moments and log. In `fp8`
    sampler's and trainer's log-probs are the same bits."""
    flags = f"--precision={precision}", f"--states={states}", "--samples=4"
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    steps = run(whole, "--steps=4", *flags)
    run(halves, *flags)
    with pytest.raises(ValueError, match="add --resume"):
        run(halves, "--steps=4", *flags)
    assert run(halves, "--steps=4", "--resume", *flags) == steps
    assert_same_run(whole, halves)
    moment = load_file(newest(whole) / "optimizer.safetensors")["m.norm"]
    assert moment.dtype == train.STATES[states] and moment.norm() > 0
    assert len({tuple(r) for r in steps}) == 1 and {"reward", "mean_dlogp", "max_dlogp", "grad_norm", "loss",
                                                    "entropy", "skipped", "lr"} <= set(steps[0])
    kinds = [r["kind"] for r in read_log(whole)]
    assert kinds == ["eval", "supervised", "supervised", "eval", *["step", "step", "eval"] * 2]
    assert all(r["grad_norm"] > 0 and r["ratio"] == 1 for r in steps), "the first update is on-policy"
    gaps = [r[k] for r in steps for k in ("mean_dlogp", "max_dlogp", "k3", "differing", "differing_tokens")]
    if precision == "fp8":
        assert not any(gaps)
    elif precision == "fp8-rollout":
        assert all(gaps) and steps[0]["max_dlogp"] < 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{1:5d} ")]
    assert lines[0].startswith(f"{1:5d} {steps[1]['reward']:7.3f}") and len(lines[0]) == len(train.COLUMNS)


@needs_gpu
def test_gpu_run_repeats_and_is_exact(tmp_path, paid):
    flags = ["--device=cuda", "--width=128", "--samples=8", "--max-new-tokens=70", "--micro-tokens=512"]
    runs = [run(tmp_path / name, *flags) for name in "ab"]
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert all(r["differing_tokens"] == 0 and r["grad_norm"] > 0 for r in runs[0])


KILLS = int(os.environ.get("KILLS", 2))


@cpu_only
def test_killed_runs_go_on(tmp_path, paid):
    """SIGKILL at random moments, saving included; started again, each time in a new process, it ends with an
    uninterrupted run's bits. The environment variable KILLS asks for more."""
    flags, killed = [f"--steps={2 * KILLS + 2}", "--save-every=1", "--resume"], tmp_path / "killed"
    log = killed / "log.jsonl"
    lines = lambda: log.read_text().count("\n") if log.exists() else 0
    run(tmp_path / "whole", *flags)
    for _ in range(KILLS):
        (_, process), goal = start(killed, *flags), lines() + random.randint(5, 7)  # four before a save
        while lines() < goal and process.poll() is None:
            time.sleep(0.005)
        time.sleep(0.1 * random.random())
        process.kill()
        process.wait()
    assert "resumed from" in output(start(killed, *flags))
    assert_same_run(tmp_path / "whole", killed)
    assert len(train.checkpoints(killed)) == 2, "as many as --keep asks for"


@pytest.fixture
def saving(tmp_path, paid):
    """A trainer that has saved step 1, and is about to save step 2."""
    run(tmp_path / "run", "--steps=1", "--save-every=1", "--keep=1")
    trainer = make_run(tmp_path / "run", "--resume", "--keep=1")
    trainer.restore()
    trainer.step = 2
    return trainer


@cpu_only
def test_killed_at_every_turn_of_a_save(tmp_path, saving):
    """Killed at each call that renames, removes or syncs, one by one: the newest checkpoint is whole."""
    trainer, outcomes = saving, []
    for last in range(1, 99):
        out = trainer.out = shutil.copytree(tmp_path / "run", tmp_path / str(last))
        pid = os.fork()                                # the child saves, and dies at its call number `last`
        if pid == 0:
            calls = iter(range(1, 99))
            for name in ("fsync", "rename", "replace", "rmdir", "unlink"):
                def call(*args, real=getattr(os, name), **options):
                    return os.kill(os.getpid(), 9) if next(calls) == last else real(*args, **options)
                setattr(os, name, call)
            trainer.save()
            os._exit(0)
        lived = os.waitpid(pid, 0)[1] == 0
        outcomes.append({path.name: path.read_bytes() for path in newest(out).iterdir()})
        if lived:
            break
        trainer.save()             # what the killed one left is in nobody's way, what it had to remove goes
        assert train.checkpoints(out) == ["step-000002"] and ".saving" not in os.listdir(out)
    assert 12 < last < 98 and json.loads(outcomes[0]["state.json"])["step"] == 1
    assert all(files in (outcomes[0], outcomes[-1]) for files in outcomes) and outcomes[0] != outcomes[-1]


def test_checkpoints_are_on_the_disk_before_they_have_their_name(saving, monkeypatch):
    """Power may fail: every file, and the folder, is synced when the rename makes it a checkpoint."""
    synced, fsync, rename, checked = set(), os.fsync, os.rename, []
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))

    def watch(source, target):
        if "step-" in os.path.basename(target):
            inside = [source] + [entry.path for entry in os.scandir(source)]
            assert {os.stat(path).st_ino for path in inside} <= synced and len(inside) > 5
            checked.append(target)
        rename(source, target)
    monkeypatch.setattr(os, "rename", watch)
    saving.save()
    assert len(checked) == 1 and os.stat(saving.out).st_ino in synced


@cpu_only
def test_full_disk_and_folders_that_cannot_be_written(tmp_path, saving, monkeypatch):
    """The message says where and how much; the checkpoint before stays, and half a one does not."""
    out = saving.out
    size = (newest(out) / "optimizer.safetensors").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)     # files that cannot grow any more: like a full disk
    for room in (size - 1, 1000, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError, match=r"step-000002 of .* GiB cannot be written .*: make room, then"):
                saving.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert newest(out).name == "step-000001" and not (out / ".saving").exists()
    saving.save()
    assert newest(out).name == "step-000002"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="--out=.*file/run cannot be written .*: give another folder"):
        run(tmp_path / "file" / "run")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="has 0.0 GiB free, a checkpoint takes"):
        run(tmp_path / "full")


@pytest.mark.parametrize("precision, kv", [("fp8", "fp8"), ("bf16", "bf16")])
def test_second_update_leaves_the_policy_that_sampled(tmp_path, paid, monkeypatch, precision, kv):
    ratios, loss = [], grpo.policy_loss

    def watch(logp, old, *rest, **options):
        ratios.append((logp.detach() - old).abs().max().item())
        return loss(logp, old, *rest, **options)
    monkeypatch.setattr(grpo, "policy_loss", watch)
    flags = "--steps=1", "--updates=2", "--micro-tokens=9999", f"--precision={precision}", f"--kv={kv}"
    step, = run(tmp_path, *flags)
    assert len(ratios) == 2 and ratios[0] == 0 < ratios[1] and step["ratio"] != 1


def test_a_wrong_bit_stops_the_run(tmp_path, paid, monkeypatch, capsys):
    generate = Sampler.generate

    def disturbed(*args, **options):
        result = generate(*args, **options)
        if len(result.logprobs) == 6:  # the training rollout, not an evaluation
            result.logprobs[3][0] = result.logprobs[3][0].nextafter(torch.tensor(0.0))
        return result
    monkeypatch.setattr(Sampler, "generate", disturbed)
    with pytest.raises(RuntimeError, match=r"step 0: .*first at sequence 3, position \d: sampler -\d"):
        run(tmp_path / "stop", "--exact=stop")
    assert len(run(tmp_path / "warn", "--exact=warn")) == 2
    said = capsys.readouterr().out
    assert said.count("note: log-probs differ first at sequence 3, position") == 1 and "expected" not in said
    assert run(tmp_path / "off", "--exact=off")[0]["differing_tokens"] == 1


def test_gradients_that_are_not_finite(tmp_path, paid, monkeypatch, capsys):
    """A step is skipped and counted: weights, moments and Adam's own step count stay as they were. Five in a
    row stop the run, and weights that are not finite are not saved."""
    factors, loss = itertools.chain([1, math.nan, 1e30, 1], itertools.repeat(math.inf)), grpo.policy_loss

    def broken(*args, **options):                             # what a broken batch does to every gradient
        value, sums = loss(*args, **options)
        return value * next(factors), sums                    # 1e30: a norm that overflows
    monkeypatch.setattr(grpo, "policy_loss", broken)
    with pytest.raises(RuntimeError, match="5 steps in a row"):
        run(tmp_path, "--steps=20", "--save-every=1", "--keep=99", "--micro-tokens=9999")
    steps = [r for r in read_log(tmp_path) if r["kind"] == "step"]
    assert [r["skipped"] for r in steps] == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert capsys.readouterr().out.count("had a non-finite gradient and was skipped") == 7
    files = [(tmp_path / f"step-{i:06d}/optimizer.safetensors").read_bytes() for i in range(9)]
    assert files[1] == files[2] == files[3] and files[0] != files[1] and files[3] != files[4] == files[8]
    trainer = make_run(tmp_path, "--resume")
    trainer.optimizer.master["norm"][3], trainer.step = math.inf, 9
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.save()
    assert newest(tmp_path).name == "step-000008"


def test_checkpoints_that_do_not_fit_are_refused(tmp_path, paid, capsys):
    out = tmp_path / "run"
    run(out)
    resume = lambda *flags: run(out, "--resume", "--steps=3", *flags)
    with pytest.raises(ValueError, match=r"is \(\d+, 64\) in what was saved, \(\d+, 128\) in this model"):
        resume("--width=128")
    with pytest.raises(ValueError, match="is absent in what was saved"):
        resume("--layers=2")
    said = capsys.readouterr().out
    assert "goes on with other flags" not in said, "a resume that is refused changes nothing"
    resume("--lr=1e-3", "--states=bf16")
    assert re.search(r"other flags: .*lr=0.001 \(was .*states=bf16 \(was fp32\)", capsys.readouterr().out)
    for name in ("optimizer.safetensors", "state.json"):
        whole = (newest(out) / name).read_bytes()
        for content in (whole[:-100], whole[:50], b"", b"version https://git-lfs", b'{"step": 2}'):
            (newest(out) / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{newest(out)} is damaged.*: remove it"):
                resume()
        (newest(out) / name).write_bytes(whole)


def test_problems_longer_than_the_context(tmp_path, paid, capsys):
    """Left out with a count; refused where none remains. Never cut."""
    rows = [row(f"question {i}", f"so\n#### {i}") for i in range(6)]
    data = write(tmp_path / "a.jsonl", *rows[:3], row("long " * 4000, "#### 9"), *rows[3:])
    held = write(tmp_path / "b.jsonl", row("held out", "#### 1"), row("word " * 4000, "#### 1"))
    flags = ["--task=jsonl", f"--data={data},{held}", "--steps=1"]
    assert len(run(tmp_path / "run", *flags)) == 1
    said = capsys.readouterr().out
    assert all(f"1 of {count} problems, with --max-new-tokens=8" in said for count in (2, 7))
    with pytest.raises(ValueError, match="or give shorter"):
        run(tmp_path / "none", *flags, "--max-new-tokens=16384")
    with pytest.raises(ValueError, match="--max-new-tokens=16384 .* not fit .*lower --difficulty"):
        run(tmp_path / "drawn", "--max-new-tokens=16384")
    plain = write(tmp_path / "c.jsonl", *rows[:3], row("bare", "7"))
    with pytest.raises(ValueError, match="learns from solutions, but the answer to 'bare"):
        run(tmp_path / "bare", "--task=jsonl", f"--data={plain},{held}")
    assert not any((tmp_path / name).exists() for name in ("none", "drawn", "bare"))
    bare = write(tmp_path / "d.jsonl", row("bare", "7"))          # held out: only its answer is asked for
    learn = "--task=jsonl", f"--data={data},{bare}", "--steps=1", "--sft-steps=1"
    assert len(run(tmp_path / "held", *learn)) == 1


@pytest.mark.parametrize("changes, spoiled, content, words", [
    (dict(vocab_size=259), "config.json", None,
     "base, problems of --task=sum: .* holds the id 259, but the model has 259 ids"),
    (dict(eos_token_id=[]), "tokenizer_config.json", b"{}", "no file names an end-of-text id"),
    ({}, "model.safetensors", b"cut off", "its header describes"),
    ({}, "tokenizer.json", b"", "tokenizer.json"),
])
def test_checkpoint_faults_before_anything_is_written(tmp_path, changes, spoiled, content, words):
    save_tiny(tmp_path / "base", **changes)
    path = tmp_path / "base" / spoiled
    path.write_bytes(path.read_bytes() if content is None else content)
    with pytest.raises((ValueError, OSError), match=words):
        run(tmp_path / "out", f"--model={path.parent}", "--sft-steps=0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [
    ("--setps=3", "did you mean --steps?"), ("--max_new_token=3", "did you mean --max-new-tokens?"),
    *[(f"--{name}=x", "'x' (choose from") for name in ("task", "precision", "kv", "states", "exact")],
    ("--updates=9", "each needs a problem of --prompts="), ("--temperature=0", "--temperature=0"),
    ("--tis=2", "--tis=2"), ("--task=jsonl", "needs --data"), ("--difficulty=1", "difficulty=1"),
    ("--task=jsonl --data=none.jsonl", "none.jsonl"), ("--model=none", "no folder none"),
    ("--steps=abc", "--steps: invalid int"), ("--lr", "--lr: expected one argument"),
    ("--lr=nan", "--lr=nan"), ("--lr=inf", "--lr=inf"),
    ("--samples=1", "--samples=1: must be a number of at least 2"),
    ("--device=tpu", "--device=tpu: it must be cuda"), ("--top-p=0.9", "unknown argument '--top-p=0.9'"),
    ("--data=x.jsonl", "is read by --task=jsonl"), ("--task=jsonl --data=a,b,c", "not 'a,b,c'"),
    ("--task=jsonl --data=a,", "not 'a,'"), ("--wandb=x", "pip install wandb"),
] + [("--device=cuda", "no CUDA device")] * (not CUDA))
def test_bad_flags_are_refused(tmp_path, monkeypatch, flags, words):
    """Named in one line or two, before anything is written."""
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)  # wandb is not installed
    with refused(words):
        run(tmp_path / "out", *flags.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program, flags, words", [
    ("train", ["--model=/no/where"], "no folder /no/where"), ("train", ["--steps=x"], "invalid int"),
    ("rollout", ["--prompt=x"], "--model"), ("rollout", ["--model=/no", "--prompt=x"], "/no"),
    ("rollout", ["--model=x", "--prompt=x", "--sed=1"], "'--sed=1': did you mean --seed"),
    ("bench", ["gem"], "did you mean gemm"), ("bench", ["gemm", "--oot=x"], "'--oot=x': did you mean --out"),
    ("bench", ["plot", "/no/where"], "/no/where"), ("bench", ["plot", "x", "x"], "2 of the runs"),
])
def test_errors_are_two_lines(program, flags, words, monkeypatch):
    """`python X.py` with a fault: one line or two and exit code 1; the exception itself with --debug."""
    for debug in ([], ["--debug"]):
        monkeypatch.setattr(sys, "argv", [program + ".py", *flags, *debug])
        with pytest.raises(Exception if debug else SystemExit, match=words) as error:
            runpy.run_path(str(HERE / f"{program}.py"), run_name="__main__")
        if not debug:
            assert str(error.value).startswith("error: ") and str(error.value).count("\n") < 2


def test_explain():
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has a total ...")
    assert rollout.explain(full, "--n") == "error: out of GPU memory: lower --n\nCUDA out of memory"
    assert rollout.explain(ValueError("a\nb\nc"), "") == "error: a\nb"
    assert rollout.explain(KeyError("x"), "") == "error: KeyError: 'x' (--debug shows where)"


def test_flags_of_the_loss(tmp_path, paid):
    flags = "--precision=fp8-rollout", "--tis=2", "--kl=0.1", "--normalize-std", "--updates=3"
    assert run(tmp_path / "a", *flags)[1]["kl"] > 0
    none = run(tmp_path / "none", *flags[2:], "--drop-truncated", "--max-new-tokens=1")[1]
    assert none["truncated"] == 1 and none["kl"] == none["loss"] == none["grad_norm"] == 0
    assert all(math.isfinite(v) for v in none.values() if isinstance(v, float))


def test_means_groups_and_learning_rate(tmp_path, paid, monkeypatch, capsys):
    flags = ["--sft-steps=0", "--steps=1", "--samples=4", "--max-new-tokens=30", "--loss-mean"]
    plain, other = (run(tmp_path / kind, *flags, kind) for kind in ("token", "completion"))
    assert plain[0]["reward"] == other[0]["reward"]
    assert plain[0]["grad_norm"] != other[0]["grad_norm"], "some end early"
    flags = "--drop-equal", "--updates=2", "--warmup=4", "--lr-decay=0.5", "--steps=20", "--lr=1"
    trainer = make_run(tmp_path / "drop", *flags)
    result = types.SimpleNamespace(tokens=[[1], [2, 3], [4], [5], [6], [7]], finish=["stop"] * 6,
                                   logprobs=[torch.zeros(n) for n in (1, 2, 1, 1, 1, 1)])
    advantages = grpo.advantages([1, 0, 1, 1, 0, 0], 2)          # the first group alone has a gradient
    first, second = trainer.update_batches([[9]] * 3, result, advantages)
    assert first["sequences"] == [([9], [1]), ([9], [2, 3])] and first["tokens"] == 3
    assert second["sequences"] == [] and second["tokens"] == second["fed"] == 0
    rates = [trainer.learning_rate(step) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5 * 0.975, 0.75 * 0.95, 0.925]), "the decay runs meanwhile"
    assert rates[19] == pytest.approx(1 - 0.5 * 19 / 20) and max(rates) == rates[3]
    monkeypatch.setattr(grpo.Example, "reward", lambda example, completion: 1.0)
    steps = run(tmp_path / "equal", "--steps=4", "--drop-equal")
    assert [r["grad_norm"] for r in steps] == [0.0] * 4 and steps[0]["equal_groups"] == 1
    assert capsys.readouterr().out.count("for 3 steps every group had equal rewards or was left out") == 1


def test_evaluation_counts_pass_at_k(tmp_path, monkeypatch, capsys):
    """Four held-out problems, three answers each; which are right is laid down here."""
    trainer = make_run(tmp_path, "--eval-samples=3", "--temperature=1.5")
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    verdicts = {e.prompt: itertools.cycle(given) for e, given in zip(trainer.task.heldout, rewards)}
    monkeypatch.setattr(grpo.Example, "reward", lambda example, text: next(verdicts[example.prompt]))
    seen, generate = [], trainer.sampler.generate
    trainer.sampler.generate = lambda *args, keys: (seen.append(keys), generate(*args, keys=keys))[1]
    for _ in range(2):
        trainer.evaluate("now")
    assert "accuracy now: 41.7% (pass@1), 75.0% (pass@3) of 4 problems, at temp" in capsys.readouterr().out
    for line in read_log(tmp_path):
        assert (line["accuracy"], line["pass_k"], line["samples"]) == (pytest.approx(5 / 12), 0.75, 3)
        assert line["standard_error"] == pytest.approx(np.std([1 / 3, 1, 0, 1 / 3]) / 2)
    assert seen[0] == seen[1] and len(set(seen[0])) == 12
    assert max(seen[0]) < 0, "not the noise of any training sample"


def test_wandb_gets_every_number(tmp_path, paid, monkeypatch):
    """By a stand-in for the package: one run, a step for each record, no text and nothing without a flag."""
    calls, wandb = [], types.SimpleNamespace(run=None, define_metric=lambda *args, **options: None)
    wandb.log = calls.append
    wandb.init = lambda project, **options: setattr(wandb, "run", project)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: True)
    run(tmp_path / "off")
    assert not calls
    steps = run(tmp_path / "on", "--wandb=mine")
    assert wandb.run == "mine" and len(calls) == len(read_log(tmp_path / "on"))
    assert [(c["step"], c["step/reward"]) for c in calls if "step/reward" in c] == [
        (r["step"], r["reward"]) for r in steps]
    assert all(isinstance(v, (int, float)) for c in calls for v in c.values())


@pytest.mark.parametrize("states", train.STATES)
@pytest.mark.parametrize("precision", model.PRECISIONS)
def test_memory_is_estimated_by_part(precision, states):
    """Against the bytes that a model and its optimizer allocate."""
    config = tiny_config(hidden_size=256, intermediate_size=512, tie_word_embeddings=False)
    policy = Transformer(config, precision)
    optimizer = adamw(policy.weights(), states=train.STATES[states])
    parts = train.memory(config, train.Config(precision=precision, states=states), 1000)
    sizes = lambda tensors: {x.data_ptr(): x.nbytes for x in tensors}         # a master may be the weight
    weights, all_states = sizes(policy.buffers()), sizes(optimizer.state().values())
    real = {"weights": sum(weights.values()) - policy.table.nbytes, "gradients": optimizer.grads.nbytes,
            "masters and moments": sum(n for at, n in all_states.items() if at not in weights)}
    for name, count in real.items():
        assert parts[name] == pytest.approx(count, rel=0.01), name


def test_what_fits_and_what_to_lower():
    """The sizes that are promised, by the estimate; and advice, which itself fits."""
    GIB, fitting = 2**30, train.fitting
    flags = lambda **changes: train.Config(micro_tokens=16384, **changes)
    h100, h200, long = 79.1 * GIB, 139.8 * GIB, 16384 + 512
    assert fitting(big_config("1.7B"), flags(), h100, long) == {}
    assert fitting(big_config("4B"), flags(), h100, long) == {"recompute": True}
    assert fitting(big_config("8B"), flags(), h200, long) == {"recompute": True, "states": "bf16"}
    assert fitting(big_config("8B"), flags(), h100, long) is None
    assert train.advice(big_config("8B"), flags(), h100, long).startswith("lower --max-new-tokens, or take")
    assert train.advice(big_config("1.7B"), flags(), h100, long) == "free the GPU of other processes"
    for size, room, longest in (("8B", 120 * GIB, 900), ("4B", 75 * GIB, 2000), ("1.7B", 40 * GIB, 3000)):
        config = big_config(size)
        change = fitting(config, flags(), room, longest)
        new = dataclasses.replace(flags(), **change)
        assert change and new.micro_tokens >= longest
        assert sum(train.memory(config, new, new.micro_tokens).values()) <= room
        text = train.advice(config, flags(), room, longest)
        assert all("--" + name.replace("_", "-") in text for name in change)


def one_update(policy, lengths, optimizer=None):
    """Loss, backward pass and, if there is one, optimizer step on sequences of these lengths."""
    device = policy.head.data.device
    prompts, completions = some_prompts([3] * len(lengths)), some_prompts([n - 2 for n in lengths], seed=1)
    pairs = list(zip(prompts, completions))
    logp = train.score(policy, pairs, torch.ones(1, device=device))
    advantages = torch.linspace(-1, 1, len(logp), device=device)
    return lambda: (grpo.policy_loss(logp, logp.detach(), advantages, len(logp))[0].backward(),
                    optimizer and optimizer.step(1e-3, 1.0))


@pytest.mark.parametrize("precision", model.PRECISIONS)
def test_recomputed_gradients_are_the_same_bits(precision):
    grads = []
    for recompute in (False, True):
        policy = scale_up(Transformer(tiny_config(), precision, DEVICE), 3.0)
        policy.recompute = recompute
        for lengths in ([40, 9, 130], [64, 5]):                    # two micro-batches add up
            one_update(policy, lengths)()
        grads.append({name: w.grad for name, w in policy.weights().items()})
    for name, grad in grads[0].items():
        assert grad.norm() > 0, name
        same(grads[1][name], grad, name)


@needs_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_the_host_never_waits_in_an_update(recompute):
    policy = Transformer(tiny_config(), "fp8", DEVICE)
    policy.recompute = recompute
    optimizer = adamw(policy.weights())
    one_update(policy, [200, 77], optimizer)()                     # compiles the kernels
    torch.cuda.synchronize()
    with no_waiting():
        with pytest.raises(RuntimeError, match="synchronizing"):
            optimizer.steps.item()                                 # the mode sees what it has to see
        for _ in range(2):
            one_update(policy, [200, 77], optimizer)()


@needs_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_peak_of_an_update_is_estimated(recompute):
    """Within a fifth, at a size whose layers outweigh the rest."""
    config = tiny_config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                         intermediate_size=3072, num_hidden_layers=8, max_position_embeddings=4096)
    for precision in model.PRECISIONS:
        policy = Transformer(config, precision, DEVICE)
        policy.recompute = recompute
        optimizer = adamw(policy.weights())
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            one_update(policy, [4000] * 4, optimizer)()
            peak = torch.cuda.max_memory_allocated() - before
        flags = train.Config(precision=precision, recompute=recompute)
        assert sum(list(train.memory(config, flags, 16000).values())[-2:]) == pytest.approx(peak, rel=0.2)


def test_memory_is_handed_over_before_every_update(tmp_path, paid, monkeypatch):
    """Also by the evaluation ahead of the supervised phase."""
    order = []

    def watched(name, call):
        return lambda *args: (order.append(name), call(*args))[1]
    monkeypatch.setattr(train, "hand_over", watched("hand over", train.hand_over))
    for name in ("supervised_step", "update"):
        monkeypatch.setattr(train.Run, name, watched(name, getattr(train.Run, name)))
    run(tmp_path, "--steps=1", "--eval-every=0")
    assert order == ["hand over", "supervised_step", "supervised_step", "hand over", "update"]


@needs_gpu
def test_rollout_and_update_hand_memory_over(tmp_path, paid):
    """200 times to and fro, pages and graphs freed each time: after the first few, not a byte is added."""
    trainer = make_run(tmp_path, "--device=cuda", "--steps=200")
    trainer.update_needs, seen = 2**60, []                         # more than is ever free
    for trainer.step in range(200):
        train.grpo_step(trainer)
        assert trainer.sampler.pool is None and not trainer.sampler.graphs
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    allocated, reserved = zip(*seen)
    assert len(set(allocated[5:])) == 1 and max(reserved[5:]) == max(reserved[5:50])
    trainer.update_needs = 0
    train.grpo_step(trainer)
    assert trainer.sampler.pool and trainer.sampler.graphs, "kept where the update fits beside them"


@needs_gpu
def test_out_of_memory_names_flags_that_help(tmp_path, paid):
    """An update too large for what the process may have; the run goes on with what the message says."""
    flags = ["--device=cuda", "--width=512", "--layers=6", "--prompts=32", "--samples=64", "--save-every=1",
             "--max-new-tokens=128"]                # tens of thousands of tokens, whatever their lengths
    run(tmp_path / "run", *flags, "--steps=1", "--micro-tokens=8192")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(RuntimeError, match="out of GPU memory .* give --.*\n.*--resume") as error:
            run(tmp_path / "run", *flags, "--resume", "--micro-tokens=999999", "--steps=2")
        helps = re.findall(r"--[a-z-]+(?:=\w+)?", str(error.value).splitlines()[0])
        assert helps and train.checkpoints(tmp_path / "run") == ["step-000000", "step-000001"]
        del error
        gc.collect()
        assert torch.cuda.memory_allocated() == before, "nothing leaks after an error that was caught"
        assert len(run(tmp_path / "run", *flags, "--resume", *helps, "--steps=2")) == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("base", [False, True])
def test_reference_is_where_grpo_started(tmp_path, paid, monkeypatch, base):
    """No second model without --kl; with it, even in a later resume only, the first policy of GRPO, loaded
    once, and before the sampler takes memory."""
    flags, out, seen, original = ["--lr=1e-2", "--warmup=0"], tmp_path / "run", [], train.Run.reference_model
    watch = lambda self: (seen.append((original(self), self.sampler.pool)), seen[-1][0])[1]
    if base:
        save_tiny(tmp_path / "base")
        flags += [f"--model={tmp_path / 'base'}"]
    monkeypatch.setattr(train.Run, "reference_model", watch)
    assert "kl" not in run(out, *flags, "--keep=9", "--save-every=1")[0] and not seen
    steps = run(out, *flags, "--steps=4", "--kl=0.1", "--resume", "--keep=9")
    start = load_file(out / "step-000000/model.safetensors")["model.norm.weight"]
    assert torch.equal(seen[0][0].norm.data, start) and steps[-1]["kl"] > 1e-4
    assert len({id(reference) for reference, _ in seen}) == 1 and seen[0][1] is None


def test_steps_draw_fresh_noise_and_train_on_the_sampled_ids(tmp_path, paid):
    trainer = make_run(tmp_path, "--samples=8", "--temperature=1.5")
    examples = [trainer.problems(0, 1)[0]] * 3
    first = trainer.rollout([trainer.encode_prompt(e) for e in examples])
    assert len({tuple(t) for t in first.tokens}) > 20, "one prompt, 24 samples"
    assert trainer.rollout([trainer.encode_prompt(e) for e in examples]).tokens == first.tokens
    trainer.step = 1
    assert trainer.rollout([trainer.encode_prompt(e) for e in examples]).tokens != first.tokens
    first.tokens = [[0xF0, 0x9F], [0xF0, 0x9F, 256]] * 12  # half a character, with and without an end
    first.logprobs = [torch.zeros(len(t)) for t in first.tokens]
    batch, = trainer.update_batches([[1]] * 3, first, torch.arange(24.0))
    assert [completion for _, completion in batch["sequences"]] == first.tokens
    assert batch["advantages"].tolist() == [float(i) for i, t in enumerate(first.tokens) for _ in t]
    assert trainer.text(first.tokens[1]) == "\ufffd"


def test_every_field_is_read():
    source = (HERE / "train.py").read_text()
    for name in train.Config.__dataclass_fields__:
        assert re.search(rf"\bcfg\.{name}\b|\"--{name}\" in", source), f"--{name} is never read"


def test_micro_batches_do_not_change_the_gradient():
    """FP32, so that only the order of sums differs: any split gives gradient and metrics of the whole."""
    torch.manual_seed(0)
    policy, results = scale_up(Transformer(tiny_config(), "bf16", dtype=FP32), 3.0), []
    pairs = list(zip(some_prompts([5, 70, 1, 33, 9]), some_prompts([12, 60, 1, 7, 30], seed=1)))
    lengths = torch.tensor([len(completion) for _, completion in pairs])
    adv, drift = torch.randn(5).repeat_interleave(lengths), 0.3 * torch.randn(2, 110)
    with torch.no_grad():
        old, ref = train.score(policy, pairs, torch.ones(1)) + drift
    for budget in (9999, 100, 1):
        for w in policy.weights().values():
            w.grad = None
        metrics, at, total = grpo.Metrics(), 0, 0.0
        batches = list(train.micro_batches(pairs, budget))
        assert sum(batches, []) == pairs
        for batch in batches:
            logp = train.score(policy, batch, torch.ones(1))
            part = slice(at, at := at + len(logp))
            loss, sums = grpo.policy_loss(logp, old[part], adv[part], 110, ref_logp=ref[part], kl_coef=0.1)
            loss.backward()
            metrics.add(len(logp), sums)
            total += loss.item()
        means = {name: float(x) / metrics.counts[name] for name, x in metrics.sums.items()}
        assert means["loss"] == pytest.approx(total, rel=1e-5)    # the reported mean is the loss
        results.append((torch.cat([w.grad.flatten() for w in policy.weights().values()]), means))
    assert len(batches) == 5
    for grad, means in results:
        assert relative(grad, results[0][0]) < 1e-5 and means == pytest.approx(results[0][1], rel=1e-4)


@cpu_only
def test_fp8_learns_like_bf16(tmp_path):
    """The same 60 supervised steps: the losses stay within 3 % of each other."""
    curves = {}
    for precision in ("bf16", "fp8"):
        flags = f"--precision={precision}", "--sft-steps=60", "--sft-lr=1.5e-3", "--steps=0"
        run(tmp_path / precision, *flags)
        curves[precision] = [r["loss"] for r in read_log(tmp_path / precision) if r["kind"] == "supervised"]
    gaps = [abs(a / b - 1) for a, b in zip(*curves.values())]
    assert curves["bf16"][-1] < 0.3 * curves["bf16"][0] and max(gaps) < 0.03, curves


def test_bare_machine(tmp_path):
    """No triton, no tracker, no network, no terminal: a run on the references."""
    code = ("import socket, sys\n"
            "absent = 'triton wandb huggingface_hub transformers tokenizers'.split()\n"
            "sys.modules.update(dict.fromkeys(absent))\n"
            "def refuse(*args): raise OSError('no network')\n"
            "socket.socket.connect = refuse\n"
            "import train\n"
            "assert train.fp8.triton is None\n"
            "train.main(sys.argv[1:])\n")
    said = output(beside("-c", code, *TINY, "--steps=1", f"--out={tmp_path}"))
    assert "triton absent" in said and "runs on the CPU" in said
    assert (tmp_path / "step-000001").exists()


# ---- several ranks, under torchrun, with gloo on the CPU ---------------------------------------------------

SHORT = ["--sft-steps=0", "--prompts=5", "--samples=4", "--max-new-tokens=40", "--steps=1", "--warmup=0",
         "--micro-tokens=256", "--seed=2"]      # a seed of unequal rewards and lengths


@cpu_only
@pytest.mark.parametrize("count, precision, limit", [(3, "fp8", 0.08), (2, "bf16", 1e-5)])
def test_ranks_sample_and_learn_what_one_process_does(tmp_path, paid, capsys, count, precision, limit):
    """The same completions, printed sample and evaluation, nearly the same gradient; and all bits again.

    Adam's first moment after one step is the gradient. Sequences are packed otherwise. In `fp8` the 128
    tokens that share scales in a weight gradient are others: the limit is the quantization error. In
    `bf16` what is rounded to BF16 belongs to one token, and sums over tokens are FP32: their order differs.
    """
    flags = [*SHORT, f"--precision={precision}"]
    ranks = start(tmp_path / "ranks", *flags, ranks=count)
    again = start(tmp_path / "again", *flags, ranks=count) if precision == "fp8" else None
    one, = run(tmp_path / "one", *flags)
    sample = re.search("--- a completion .*", capsys.readouterr().out)[0]
    text = output(ranks)
    if again:
        output(again)
        assert_same_run(tmp_path / "ranks", tmp_path / "again")
    assert sample in text and f"{count} ranks" in text and text.count("saved") == 1
    log = read_log(tmp_path / "ranks")
    several, = [r for r in log if r["kind"] == "step"]
    assert log[0] == read_log(tmp_path / "one")[0]
    assert several.keys() == one.keys() and one["grad_norm"] > 0
    same = "reward solved equal_groups length length_max truncated tokens ratio max_dlogp differing_tokens lr"
    if precision == "fp8":
        assert several["differing_tokens"] == several["max_dlogp"] == 0
        assert all(several[name] == one[name] for name in same.split())
    for name in ("entropy", "loss"):
        assert several[name] == pytest.approx(one[name], rel=1e-9 if precision == "fp8" else 1e-3, abs=1e-9)
    assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=limit)
    a, b = (load_file(newest(tmp_path / name) / "optimizer.safetensors") for name in ("one", "ranks"))
    for name in a:
        if name.startswith(("m.", "master.")):
            exact = name.endswith(("norm", "embedding")) and name.startswith("m.")     # no FP8 product
            assert relative(b[name], a[name]) < (1e-5 if exact else limit), name


@cpu_only
def test_one_rank_goes_on_as_two_and_back(tmp_path, paid):
    """With KL, old log-probs and updates of a sequence or two. An interrupt of rank 1 alone stops both."""
    flags = [*SHORT, "--kl=0.1", "--updates=2", "--precision=bf16", "--drop-truncated", "--resume"]
    out = tmp_path / "run"
    run(out, *flags)
    hook = ("if os.environ['RANK'] == '1':\n"
            "    advantages = grpo.advantages\n"
            "    grpo.advantages = lambda *a: (os.kill(os.getpid(), signal.SIGINT), advantages(*a))[1]")
    text = output(start(out, *flags, "--steps=9", ranks=2, hook=hook))
    assert "resumed from" in text and "interrupted after 2 steps, saved" in text
    steps = run(out, *flags, "--steps=3")
    assert [r["step"] for r in steps] == [0, 1, 2] and [r["skipped"] for r in steps] == [0, 0, 0]


@cpu_only
def test_a_rank_that_fails_ends_the_run(tmp_path, paid):
    """A wrong bit in what rank 1 sampled first, a completion of the third problem: one message, no hang.

    Before that, supervised steps of one solution, so that a rank has nothing to do: the bits of one process.
    """
    hook = ("if os.environ['RANK'] == '1':\n"
            "    generate = rollout.Sampler.generate\n"
            "    def disturbed(*args, **options):\n"
            "        result = generate(*args, **options)\n"
            "        result.logprobs[0][0] += 1\n"
            "        return result\n"
            "    rollout.Sampler.generate = disturbed")
    began = time.time()
    flags = [*SHORT, "--sft-steps=2", "--sft-batch=1", "--steps=0"]
    run(tmp_path / "one", *flags)
    status, errors = finished(start(tmp_path / "run", *flags, "--steps=1", ranks=2, hook=hook))
    assert status != 0 and time.time() - began < 60
    log = read_log(tmp_path / "run")
    assert len(log) == 4 and log == read_log(tmp_path / "one")[:4]
    assert re.findall("rank .: error.*", errors) == re.findall(
        r"rank \d: error: step 0: log-probs differ first at sequence 8, position \d+: .*", errors) != []


@pytest.mark.parametrize("flags, words", [
    ("--prompts=3", "each of the 4 ranks"), ("--prompts=4 --device=cuda:1", "every rank takes the GPU"),
    ("--prompts=4 --device=cuda", "torch sees 1 GPUs")])
def test_ranks_that_cannot_work_are_refused(monkeypatch, flags, words):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=words):
        train.parse([*TINY, *flags.split()])
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="several hosts"):
        train.parse([*TINY, "--prompts=8"])


# ============================================================================================================
# 8  The benchmarks
# ============================================================================================================


@cpu_only
def test_bench_block_in_plain_torch():
    """The layer that a whole block is compared with computes what ours does, gradients included."""
    config = tiny_config(num_hidden_layers=1, model_type="qwen3")
    policy, packing = Transformer(config, "bf16", "cpu", FP32), model.pack([20] * 3, "cpu")
    run, leaves = bench.torch_block(policy, 20, bench.SDPBackend.MATH)
    h, delta, *grads = torch.randn(4, 60, config.hidden_size).unbind()
    h.requires_grad_(), delta.requires_grad_()
    mine, other = bench.our_block(policy, packing)(h, delta), run(h, delta)
    mine += torch.autograd.grad(mine, (h, delta), grads)
    other += torch.autograd.grad(other, (h, delta, *leaves), grads)
    mine += tuple(w.grad for w in policy.layers[0].children())
    assert max(map(relative, mine, other)) < LIMIT[FP32]


def call(program, arguments, monkeypatch):
    """The program's main() as the command line starts it; its exit code."""
    monkeypatch.setattr(sys, "argv", [program + ".py", *arguments])
    try:
        return __import__(program).main()
    except SystemExit as done:
        return done.code


@cpu_only
def test_bench_exact(tmp_path, monkeypatch, capsys):
    """On a small model in all precisions: rows in the file, and exit code 1 where a bit differs."""
    monkeypatch.setattr(bench, "EXACT_QUICK", [(1, 3, 5, 20), (7, 3, 12, 70)])
    monkeypatch.setattr(bench, "EXACT_MODELS", {"small": ("qwen2", 128, 96, 2, 1, 64, True)})
    arguments = ["exact", "--quick", f"--out={tmp_path / 'rows.json'}"]
    assert call("bench", arguments, monkeypatch) == 0
    rows = bench.read_results(tmp_path / "rows.json")["rows"]
    assert len(rows) == 6 and all(r["pages"] > 0 for r in rows if r["precision"] == "fp8")
    assert [r["differing"] > 0 for r in rows] == [r["precision"] == "fp8-rollout" for r in rows]
    monkeypatch.setattr(bench, "score", lambda *args: train.score(*args) + 1)
    monkeypatch.setattr(bench, "EXACT_QUICK", bench.EXACT_QUICK[:1])
    assert call("bench", arguments, monkeypatch) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["differing"] > 0


@pytest.fixture
def toy_bench(monkeypatch):
    """bench.py on the CPU at a size of nothing: what a section calls on a GPU it calls here. The clock stands
    still for kernels: all take 2 microseconds."""
    def compare(contenders, *args, **options):
        return {name: [call() for call in calls] and (2.0, 0.0) for name, calls in contenders.items()}
    values = dict(DEVICE="cpu", VOCAB=260, QWEN3={"1.7B": (128, 8, 128, 1)}, COLD=1, copy_rate=lambda: 1e12,
                  compare=compare, timed=lambda parts: [part() or 1 for part in parts])
    for name, value in values.items():
        monkeypatch.setattr(bench, name, value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(Sampler, "_graph", lambda sampler, B: None)


@cpu_only
def test_bench_against_libraries(toy_bench):
    """All rows of kernels: what ours is compared with computes the same, or refuses and is named."""
    table = bench.Table("toy", [], "us")
    for case in bench.PRODUCTS:
        bench.gemm_row(table, case, "40 x 130 x 300", 40, 130, 300)
    for case, (shape, _, make) in bench.quant_cases(40, 128, 64).items():
        make()()
    bench.block_row(table, "1.7B", 20, 60)
    bench.optimizer_row(table, "1.7B")
    bench.attention_rows(table, 20, 60, 8, 4, 64)
    bench.paged_row(table, 3, 70, 8, 4, 64)
    bench.head_rows(table, 256, 32, 260)
    assert [r["us"] for r in table.rows] == [2] * 14 and all(r["of_limit"] > 0 for r in table.rows)
    assert sum("x_bf16" in r for r in table.rows) == 6 and sum("x_sdpa" in r for r in table.rows) == 2
    with pytest.raises(RuntimeError, match="toy: theirs: relative difference 5.00e-01 from ours"):
        bench.checked("toy", {"ours": [lambda: torch.ones(3)], "theirs": [lambda: torch.ones(3) / 2]}, 0.1)


@cpu_only
def test_bench_rollout_and_update(toy_bench):
    """Their rows, the rates beside those of BF16."""
    step, rollouts = (bench.Table(name, [], "x_bf16", key="model") for name in ("step", "rollout"))
    prompts, n, limits = bench.rollout_request(2, 3, 10)
    for precision in ("bf16", "fp8"):
        bench.step_row(step, "1.7B", precision, "bf16", 2, 3, 5, micro_tokens=200)
        policy = bench.random_model("1.7B", precision, kv=precision)
        bench.rollout_row(rollouts, policy, "1.7B", [p[:9] for p in prompts], n, limits, "2 x 3", theirs=1e9)
        _, policy, optimizer = bench.trained_model("1.7B", precision)
        assert len(bench.update_seconds(policy, optimizer, 2, 9)) == 4
    for base, ours in step.rows, rollouts.rows:
        assert base["precision"] == "bf16" and base["x_bf16"] == 1
        assert ours["x_bf16"] == pytest.approx(ours["tok_per_s"] / base["tok_per_s"])
    assert all(r["case"] == "6 x 5" and r["rollout_s"] > 0 and r["update_s"] > 0 for r in step.rows)
    assert all(r["tokens"] == sum(limits) and 0 < r["x_transformers"] < 1 for r in rollouts.rows)


def test_bench_rows(tmp_path):
    """New rows take the place of old ones about the same thing, and no others; means are geometric."""
    rows, out = [], str(tmp_path / "rows.json")
    table = bench.Table("gemm", rows, "us", "x_bf16")
    table.add("fprop", "a", us=3.0, x_bf16=2.0), table.add("fprop", "b", us=4.0, x_bf16=8.0)
    table.add("wgrad", "a", us=5.0, x_bf16=None)
    bench.merge(out, [{**row, "us": 0.0} for row in rows] + [{"section": "quant", "case": "x", "shape": "a"}])
    table.means()
    bench.merge(out, rows)
    found = {(r["section"], r["case"], r["shape"]): r for r in bench.read_results(out)["rows"]}
    assert len(found) == len(bench.read_results(out)["rows"]) == 6
    assert [found["gemm", "fprop", shape].get("us") for shape in ("a", "b", "geometric mean")] == [3, 4, None]
    assert found["gemm", "fprop", "geometric mean"]["x_bf16"] == pytest.approx(4)


PLOTS = re.findall("^python bench.py (plot .+)", (HERE / "assets/README.md").read_text(), re.M)
assert PLOTS, "assets/README.md has lost its commands"


@pytest.mark.parametrize("command", PLOTS)
def test_figures_are_drawn_from_committed_logs(tmp_path, monkeypatch, command):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(HERE)
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True).stdout
    assert call("bench", [*words.split(), f"--out={tmp_path / 'picture.png'}"], monkeypatch) in (None, 0)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@cpu_only
def test_mismatch_section(tmp_path, monkeypatch, capsys):
    """The exact flow is a line at zero; a rule lifted on one side shows from where it may, then is back."""
    monkeypatch.setattr(bench, "MISMATCH_QUICK", (1, 64))
    monkeypatch.setattr(model, "SPLIT", PAGE)
    save_tiny(tmp_path)
    before, rows = {module: dict(vars(module)) for module in (model, fp8)}, []
    bench.mismatch(rows, True, str(tmp_path))
    assert before == {module: dict(vars(module)) for module in (model, fp8)}
    ranking = re.findall(r"^  (.+) \(\S+\)$", capsys.readouterr().out.split("|dlogp|:")[1], re.M)
    by_gap = sorted(rows, key=lambda r: (-r["mean_dlogp"], r["case"] == "exact"))
    assert ranking == [r["case"] for r in by_gap]
    found = {row["case"]: row for row in rows}
    for case in ("exact", "both in BF16"):
        assert found[case]["differing"] == 0 and not any(found[case]["bins"]), case
    for case in ("FP8 and BF16", "KV in FP8", "head tile of 128"):
        assert found[case]["differing"] > 0, case
    for case in ("softmax unsplit", "KV tile of 128"):  # the prompt has 12 tokens: one page up to token 52
        by_end = dict(zip(found[case]["edges"][1:], found[case]["bins"], strict=True))
        assert any(by_end.values()) and not any(gap for end, gap in by_end.items() if end <= 52), case


def test_relaunched_kernels(monkeypatch):
    """A kernel gets other options, and keeps what else its launch asks for; the other kernels keep theirs."""
    seen = []
    for name in ("norm_kernel", "plain_kernel"):
        record = lambda *args, name=name, **options: seen.append((name, args, tuple(options.values())))
        monkeypatch.setattr(fp8, name, {(5,): record})
    for changes in [], [bench.relaunched(fp8, "norm_kernel", enable_fp_fusion=True, num_warps=4)]:
        with bench.changed(*changes):
            fp8.launch(fp8.norm_kernel, 5, "x", num_warps=1)
            fp8.launch(fp8.plain_kernel, 5, "y", num_warps=1)
    plain = ("plain_kernel", ("y",), (False, 1))
    assert seen == [("norm_kernel", ("x",), (False, 1)), plain, ("norm_kernel", ("x",), (True, 4)), plain]


def test_moves_section(tmp_path, monkeypatch, paid):
    """A watched run is the same run. At learning rate 0 nothing moves; the gradient is near BF16's anyway."""
    rows, plain = [], run(tmp_path / "plain")
    table = bench.Table("moves", rows, key="model")
    monkeypatch.setattr(train.Run, "update", bench.watch(table, "tiny", train.Run.update))
    assert run(tmp_path / "watched") == plain
    run(tmp_path / "still", "--lr=0", "--steps=1")
    assert [row["case"] for row in rows] == ["update 0", "update 1", "update 0"]
    moved = [(row["codes_changed"] > 0, row["dlogp"] > 0) for row in rows]
    assert moved == [(True, True), (True, True), (False, False)]
    assert all(0.9 < cosine < 1 for row in rows for cosine in row["cosines"])


# ============================================================================================================
# 9  The commands of the README
# ============================================================================================================


def readme_commands():
    """(program, arguments) of every `python X.py` line in a code block of README.md."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [m for line in lines for m in re.findall(r"\bpython3? (\w+)\.py\b([^&|#>]*)", line)]
    return list(dict.fromkeys((program, arguments.strip()) for program, arguments in found))


@pytest.mark.parametrize("program, arguments", readme_commands())
def test_readme_command(tmp_path, monkeypatch, program, arguments):
    """At a tiny size, with a checkpoint and data made here, it does what it says."""
    arguments = shlex.split(arguments)
    assert call(program, ["--help"], monkeypatch) in (None, 0)
    flags = {a.split("=")[0] for a in arguments}
    monkeypatch.chdir(tmp_path)
    save_tiny("model")
    write(Path("rows.jsonl"), *(f'{{"question": "{i} + 1?", "answer": "#### {i + 1}"}}' for i in range(30)))
    if program == "train":
        small = [a for a in TINY if not (a.startswith("--difficulty") and "--task=jsonl" in arguments)]
        small += ["--model=model"] * ("--model" in flags) + ["--data=rows.jsonl"] * ("--data" in flags)
        small += ["--out=run"]
        assert call(program, arguments + small, monkeypatch) in (None, 0)
        assert sum(r["kind"] == "step" for r in read_log("run")) == 2
    elif program == "rollout":
        small = ["--model=model", "--max-new-tokens=8", "--device=cpu"]
        assert call(program, arguments + small, monkeypatch) in (None, 0)
    else:                                    # each section has a test of its own, or needs a GPU
        ran, stub = [], lambda name: lambda rows, quick, *folders: ran.extend((name, *folders))
        monkeypatch.setattr(bench, "SECTIONS", {name: stub(name) for name in bench.SECTIONS})
        monkeypatch.setattr(bench, "ON_CPU", bench.SECTIONS)
        assert call(program, [*arguments, "--quick"], monkeypatch) == 0 and ran == arguments
