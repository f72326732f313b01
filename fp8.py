"""Blockwise FP8 for training and sampling: quantizers, the three products of a linear layer, the optimizer.

A linear layer runs three matrix products. All three take E4M3 codes with FP32 scales beside them, and are one
operation: rows with a scale for every 128 values, times a matrix with one for every 128x128 block.

    product              left operand (rows, contracted)    right operand                    out
    FProp  Y  = X W^T    X    (M, K), 1x128 along K         W   (N, K), 128x128              BF16
    DGrad  dX = dY W     dY   (M, N), 1x128 along N         W^T (K, N), the same codes       BF16
    WGrad  dW = dY^T X   dY^T (N, M), 1x128 along M         X^T (K, M), 128x128              FP32, accumulated

M counts tokens, K input and N output features. A scale is amax/448, the factor that dequantizes. It is made
fresh for every tensor: nothing to calibrate, no history to keep. Gradients are E4M3 too: with a scale for
every 128 values the range of E5M2 is not needed, while the mantissa bit that it gives up would be missed.

Layout. Hopper's FP8 tensor cores read both operands contiguous along the contracted axis, and no two of the
products contract the same one. So a BF16 activation is quantized in two layouts: row-wise for FProp, and
transposed for WGrad, where the scale of a block is the largest of its tokens' row-wise ones. dY is read once
and written in both. A weight is stored once: a square block has one scale whichever way it is turned, so the
backward pass transposes the codes, a layer at a time. Scales lie with tokens (or features) contiguous, one
line for each group of 128. Rows of codes start on 16 bytes, as the TMA unit demands. Tokens are padded to 128
with exact zeros, which add nothing to a sum.

What sampler and trainer share: everything on the way to a log-probability. The same buffers of codes, written
once an update; the same norm, SwiGLU and quantizer kernels; the same product. The sampler runs the trainer's
forward pass, so the quantization error is part of the policy that is trained, not a gap between two policies.

What stays BF16 or FP32: embedding, head, norms, RoPE, softmax, attention, the residual stream and gradients
between layers in BF16; accumulators and weight gradients in FP32; master weights and AdamW's moments in FP32,
or in BF16 with stochastic rounding.

Where this departs from Jet-RL (arXiv 2601.14243), whose recipe it is otherwise: Jet-RL keeps the row-wise
codes of an activation, and for WGrad quantizes those again, with a scale for every feature and 128 tokens.
Here WGrad's operand comes straight from the BF16 values, which the layer saves anyway, and in blocks. With a
scale for every feature a product runs at three quarters of its speed (cuBLASLt's does: bench.py gemm), for
want of time to multiply by them. A block's scale costs little, as E4M3 is a floating-point format: values
down to 2^-14 of the largest in their block keep all their bits, and not to round twice is worth more (a test
compares). Values below 2^-18.8 of it are lost, in a block of 128 x 128 rather than in a group of 128.

The numerics contract. A row of any result depends on that row alone: not on the number of rows, not on the
tile that computed it, not on whether the sampler or the trainer asked. Then log-probabilities agree to the
last bit, and a test can say ==. It takes six rules:

  1. K is never split. Its blocks of 128 ascend; the tensor core sums each into a fresh accumulator (of which
     it keeps about 14 bits, hence the short sums), and one explicit fma adds that to an FP32 total.
  2. Every kernel is launched with enable_fp_fusion=False. Otherwise the compiler may contract a*b + c in one
     tile shape and not in another, and the last bit differs. Where a fused product is meant, tl.fma says so.
  3. Division and square root are IEEE's (div_rn, sqrt_rn), in kernels as in references. A code is a product
     with the rounded inverse of the scale: one division a group, where one a value would cost more time than
     reading the value.
  4. A reduction over a row has one kernel, whose number of warps depends on the width alone. Nothing is
     autotuned: what may differ between two runs must not decide on an order.
  5. An FP8 product has 64 rows and 4 warps or more. Below that tl.dot becomes an FP16 product, with other
     bits. A decode step has fewer tokens: there the weights stand in for the rows, or rows are left empty.
  6. The backward pass is deterministic too: ordered sums, and no atomic ones where an order would be open.

Attention and the head keep the like (model.py, where their kernels begin), and so does the noise
(rollout.py).

Each topic comes in one order: torch reference (the specification, and all that a CPU needs), Triton kernel,
wrapper that picks one of the two. The product has two more kernels, in Gluon and for Hopper alone, which are
faster and give the plain one's bits. Autograd joins the topics near the end.
"""

import contextlib
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS, or a bare CPU machine: the references below are all there is, and they suffice
    triton = TensorDescriptor = None

    class tl:
        """Stands in for triton.language so that kernel signatures can be parsed; nothing is ever launched."""
        constexpr = staticmethod(lambda value: value)

BLOCK = 128  # one scale per 128 values of a row, or per 128x128 block; the K step of every product
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # the largest finite E4M3 number; its neighbour above is NaN
AMAX_FLOOR = 1e-12  # keeps zero blocks from dividing by zero, yet lies far below any gradient worth keeping
INTERPRET = triton is not None and triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on a CPU


def jit(fn=None, compiler=triton, **options):
    """The compiler's jit, or the identity where it is not installed (the kernel is then never called)."""
    if compiler is None:
        return fn if fn is not None else (lambda f: f)
    return compiler.jit(fn, **options)


def launch(kernel, programs, *args, waits=False, **options):
    """Run `kernel` on a one-dimensional grid (y and z stop at 65,535), which may be empty; contraction off.

    Widths and distances between rows are compile-time constants, where tokens do not enter them; token counts
    are not even specialized on being 1 or a multiple of 16 (do_not_specialize): which binary runs must not
    depend on such an accident.
    waits: it calls `wait_for_inputs`, and may start early where launches are `overlapped`.
    """
    if waits and overlap:
        options["launch_pdl"] = True
    if programs:
        kernel[(programs,)](*args, enable_fp_fusion=False, **options)


overlap = False  # set by `overlapped`


@contextlib.contextmanager
def overlapped():
    """Within it a kernel may start before the one ahead of it ends: a decode step has hundreds of kernels,
    most of which work for no longer than a start takes.

    Those of a step say when the next may come ("programmatic dependent launch", of Hopper and later). So
    programs take their places as soon as there are free ones, and wait there for what they read.
    Some read weights before they wait: no kernel that writes weights may let the next one come, and none
    does. RoPE reads positions so, too: the embedding, between it and their writer, starts as usual.
    """
    global overlap
    nvidia = torch.cuda.is_available() and not torch.version.hip
    overlap = nvidia and not INTERPRET and torch.cuda.get_device_capability() >= (9, 0)
    try:
        yield
    finally:
        overlap = False


COMPILED = tl.constexpr(not INTERPRET)


@jit
def start_next():
    """The next kernel may start, as far as there is room beside this one. To say so takes a program longer
    than the work of a small one: grids of many programs, as in training, do not."""
    if COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        if tl.num_programs(0) < 5000:
            tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_inputs():
    """Returns when all kernels before this one have ended: nothing that they write may be read earlier, and
    nothing written that they read. Elsewhere than in `overlapped` neither function does anything."""
    if COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


def use_kernels(x):
    """Whether tensor `x` goes to the Triton kernels (on a GPU, or interpreted) or to the torch references."""
    return x.is_cuda or INTERPRET


def cdiv(n, d):
    return -(-n // d)


def round_up(n, multiple):
    return cdiv(n, multiple) * multiple


def sqrt_reference(x):
    """IEEE square root of FP32, as sqrt_rn: torch's own, on a CPU, may end one bit beside it."""
    return x.double().sqrt().float()


# ------------------------------------------------------------------------------------------------------------
# Quantizers


def empty_codes(rows, cols, device):
    """Uninitialized E4M3 (rows, cols) whose rows start on 16 bytes; the gap is never read."""
    return torch.empty(rows, round_up(cols, 16), dtype=E4M3, device=device)[:, :cols]


def empty_scales(groups, rows, device):
    """Uninitialized FP32 (groups, rows); every group starts on 16 bytes."""
    return torch.empty(groups, round_up(rows, 4), dtype=torch.float32, device=device)[:, :rows]


def encode_reference(x, axes):
    """x FP32 -> E4M3 codes of its shape, FP32 scales with `axes` reduced to 1: x is about codes * scales.

    NaN and Inf pass through amax into the scale: a bad step shows in the loss, not as a saturated code. The
    cast needs no clamp: scale, inverse and product are rounded once each, so what should be 448 is at most a
    few FP32 steps off, and far from 464, where a cast leaves the range.
    """
    scale = x.abs().amax(axes, keepdim=True).clamp(min=AMAX_FLOOR) / E4M3_MAX
    return (x * (1 / scale)).to(E4M3), scale


def quantize_rows_reference(x):
    M, K = x.shape
    q, s = encode_reference(F.pad(x.float(), (0, -K % BLOCK)).view(M, cdiv(K, BLOCK), BLOCK), 2)
    codes, scales = empty_codes(M, K, x.device), empty_scales(q.shape[1], M, x.device)
    codes.copy_(q.flatten(1)[:, :K])
    scales.copy_(s[:, :, 0].t())
    return codes, scales


def transposed_reference(x):
    """x (M, K) -> FP32 (K, Mp): tokens are padded to 128 with zeros."""
    return F.pad(x.float(), (0, 0, 0, -x.shape[0] % BLOCK)).t().contiguous()


def quantize_cols_reference(x):
    return quantize_rows_reference(transposed_reference(x))


def quantize_blocks_reference(w):
    N, K = w.shape
    w = F.pad(w.float(), (0, -K % BLOCK, 0, -N % BLOCK))
    q, s = encode_reference(w.view(w.shape[0] // BLOCK, BLOCK, -1, BLOCK), (1, 3))
    return q.view(w.shape)[:N, :K], s[:, 0, :, 0]


def quantize_blocks_t_reference(x):
    return quantize_blocks_reference(transposed_reference(x))


@jit
def encode(x):
    """encode_reference for the rows of an FP32 tile; -> codes, scales (rows,)."""
    scale = scale_of(tl.max(magnitude(x), 1))
    return codes_of(x, scale[:, None]), scale


@jit
def magnitude(x):
    """|x| as an integer: without their sign bit, floats order as their bits do, with Inf and NaN on top. So
    an integer maximum propagates NaN, which tl.max of floats would drop."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(peak):
    """The scale of values whose largest `magnitude` is peak."""
    amax = peak.to(tl.float32, bitcast=True)
    return tl.div_rn(tl.maximum(amax, 1e-12, propagate_nan=tl.PropagateNan.ALL), 448.0)


@jit
def codes_of(x, scale):
    return (x * tl.div_rn(1.0, scale)).to(tl.float8e4nv)


@jit
def store_rows(x, codes, scales, quads, group, m, k, M, K: tl.constexpr, CODES_LINE: tl.constexpr):
    """Quantize the FP32 tile x, rows m of a group of 128 columns k, and store it; quads * 4 scales a line."""
    q, s = encode(x)
    tl.store(codes + m[:, None].to(tl.int64) * CODES_LINE + k, q, mask=(m[:, None] < M) & (k < K))
    tl.store(scales + group * (quads * 4) + m, s, mask=m < M)


@jit
def store_transposed(x, scale, codes, groups, group, k, K: tl.constexpr):
    """Store the codes of a group of 128 tokens, columns k, transposed; groups * 128 codes a line. scale: one
    for all, or (1, columns, 1).

    x is an FP32 tile (128 / n, columns, n), token a * n + b at [a, :, b], which tl.join made of n = 2 or 4
    tiles. So the codes of n neighbours lie side by side in one thread, and go through shared memory as one
    word: byte by byte, the transposition would take longer than all of the rest.
    """
    q = codes_of(x, scale).permute(1, 0, 2).reshape(x.shape[1], 128)
    # No mask on tokens: the padding was loaded as zeros, and is stored as zeros.
    out = codes + group * 128 + k[:, None].to(tl.int64) * (groups * 128) + tl.arange(0, 128)
    tl.store(out, q, mask=k[:, None] < K)


@jit
def block_scale(row_scales, quads, scales, scales_line, M, i, k0):
    """The scale of group i of 128 tokens by the 128 features around k0: the largest of the tokens' own, as
    quantize_rows gave them (quads * 4 a line), for rounding keeps the order. The program at the block's first
    feature stores it, at `scales` (K/128, groups) with scales_line a line."""
    m, block = i * 128 + tl.arange(0, 128), k0 // 128
    own = tl.load(row_scales + block * (quads * 4) + m, mask=m < M, other=0)
    scale = tl.max(magnitude(own), 0).to(tl.float32, bitcast=True)
    if k0 % 128 == 0:
        tl.store(scales + block * scales_line + i, scale)
    return scale


@jit
def quantize_rows_tile(x, codes, scales, quads, i, j, M, K: tl.constexpr, X_LINE: tl.constexpr,
                       CODES_LINE: tl.constexpr, TILE: tl.constexpr):
    """Tile i of TILE tokens by group j of 128 features."""
    m, k = i * TILE + tl.arange(0, TILE), j * 128 + tl.arange(0, 128)
    offsets = m[:, None].to(tl.int64) * X_LINE + k  # 64 bits: tokens times features pass 2^31
    tile = tl.load(x + offsets, mask=(m[:, None] < M) & (k < K), other=0).to(tl.float32)
    store_rows(tile, codes, scales, quads, j, m, k, M, K, CODES_LINE)


@jit
def load_tokens(x, norm_w, rstd, m, k, left, K: tl.constexpr, X_LINE: tl.constexpr):
    """Tokens m, of which `left` are there, and columns k as an FP32 tile. With `rstd`, x is the input of an
    RMSNorm whose output is computed on the way, rounded as the norm rounds it."""
    tile = tl.load(x + (m[:, None] * X_LINE + k), mask=(m[:, None] < left) & (k < K), other=0).to(tl.float32)
    if rstd is not None:
        r = tl.load(rstd + m, mask=m < left, other=0)
        tile = tile * r[:, None] * tl.load(norm_w + k, mask=k < K, other=0).to(tl.float32)
        tile = tile.to(x.dtype.element_ty).to(tl.float32)
    return tile


@jit
def load_group(x, norm_w, rstd, i, k, M, K: tl.constexpr, X_LINE: tl.constexpr):
    """Group i of 128 tokens and columns k, as store_transposed takes it."""
    m, left = 4 * tl.arange(0, 32), M - i * 128
    x += i.to(tl.int64) * (128 * X_LINE)  # 64 bits; within the group 32 are enough
    if rstd is not None:
        rstd += i * 128
    x0 = load_tokens(x, norm_w, rstd, m, k, left, K, X_LINE)
    x1 = load_tokens(x, norm_w, rstd, m + 1, k, left, K, X_LINE)
    x2 = load_tokens(x, norm_w, rstd, m + 2, k, left, K, X_LINE)
    x3 = load_tokens(x, norm_w, rstd, m + 3, k, left, K, X_LINE)
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(32, k.shape[0], 4)


@jit(do_not_specialize=["quads", "M"])
def quantize_rows_kernel(x, codes, scales, quads, M, K: tl.constexpr, X_LINE: tl.constexpr,
                         CODES_LINE: tl.constexpr, TILE: tl.constexpr):
    i, j = tl.program_id(0) // tl.cdiv(K, 128), tl.program_id(0) % tl.cdiv(K, 128)
    quantize_rows_tile(x, codes, scales, quads, i, j, M, K, X_LINE, CODES_LINE, TILE)


@jit(do_not_specialize=["quads", "M"])
def quantize_rows_cols_kernel(x, codes, scales, codes_t, scales_t, quads, M, K: tl.constexpr,
                              X_LINE: tl.constexpr, CODES_LINE: tl.constexpr):
    """Of the programs of a group of 128 tokens the first half quantizes rows, 32 tokens by 128 features, the
    second half columns, 32 features. So x comes from memory once, and the second time from the cache. One
    program that held a tile for both would need so many registers that too few of them fit."""
    blocks: tl.constexpr = (K + 127) // 128
    i, part = tl.program_id(0) // (8 * blocks), tl.program_id(0) % (8 * blocks)
    if part < 4 * blocks:
        row_tile = i * 4 + part // blocks
        quantize_rows_tile(x, codes, scales, quads, row_tile, part % blocks, M, K, X_LINE, CODES_LINE, 32)
    else:
        # A thread loads two columns at a time (max_contiguous), though eight BF16 numbers would fit: it
        # computes the scales of all its columns itself, two divisions for each.
        k = tl.max_contiguous((part - 4 * blocks) * 32 + tl.arange(0, 32), 2)
        tile = load_group(x, None, None, i, k, M, K, X_LINE)
        scale = scale_of(tl.max(tl.max(magnitude(tile), 2), 0))
        store_transposed(tile, scale[None, :, None], codes_t, tl.cdiv(M, 128), i, k, K)
        tl.store(scales_t + i * ((K + 3) // 4 * 4) + k, scale, mask=k < K)  # lines on 16 bytes


@jit(do_not_specialize=["quads", "M", "scales_line"])
def quantize_blocks_t_kernel(x, norm_w, rstd, row_scales, codes, scales, quads, M, scales_line,
                             K: tl.constexpr, X_LINE: tl.constexpr, WIDTH: tl.constexpr):
    """One program quantizes 128 tokens by WIDTH features, transposed."""
    i, k0 = tl.program_id(0) // tl.cdiv(K, WIDTH), tl.program_id(0) % tl.cdiv(K, WIDTH) * WIDTH
    k = k0 + tl.arange(0, WIDTH)
    tile = load_group(x, norm_w, rstd, i, k, M, K, X_LINE)
    scale = block_scale(row_scales, quads, scales, scales_line, M, i, k0)
    store_transposed(tile, scale, codes, tl.cdiv(M, 128), i, k, K)


@jit
def quantize_blocks_kernel(w, codes, scales, N: tl.constexpr, K: tl.constexpr,
                           W_LINE: tl.constexpr, CODES_LINE: tl.constexpr):
    """One program quantizes one 128x128 block of w with one scale."""
    block = tl.program_id(0)
    n = block // tl.cdiv(K, 128) * 128 + tl.arange(0, 128)[:, None]
    k = block % tl.cdiv(K, 128) * 128 + tl.arange(0, 128)
    mask = (n < N) & (k < K)
    tile = tl.load(w + n.to(tl.int64) * W_LINE + k, mask=mask, other=0).to(tl.float32)
    scale = scale_of(tl.max(tl.max(magnitude(tile), 1), 0))
    tl.store(codes + n.to(tl.int64) * CODES_LINE + k, codes_of(tile, scale), mask=mask)
    tl.store(scales + block, scale)


@jit
def transpose_kernel(x, out, N: tl.constexpr, K: tl.constexpr, X_LINE: tl.constexpr, OUT_LINE: tl.constexpr):
    """One program transposes a 128x256 tile of bytes; programs go down the columns, whose lines they fill."""
    n = tl.program_id(0) % tl.cdiv(N, 128) * 128 + tl.arange(0, 128)[:, None]
    k = tl.program_id(0) // tl.cdiv(N, 128) * 256 + tl.arange(0, 256)
    mask = (n < N) & (k < K)
    tile = tl.load(x + n.to(tl.int64) * X_LINE + k, mask=mask)
    tl.store(out + k.to(tl.int64) * OUT_LINE + n, tile, mask=mask)


def unit_stride(x):
    """x, or a copy with contiguous rows: kernels take any distance between rows, none between columns."""
    return x if x.stride(1) == 1 else x.contiguous()


def row_outputs(x):
    return empty_codes(*x.shape, x.device), empty_scales(cdiv(x.shape[1], BLOCK), x.shape[0], x.device)


def block_outputs_t(x):
    K, groups = x.shape[1], cdiv(x.shape[0], BLOCK)
    return empty_codes(K, groups * BLOCK, x.device), empty_scales(cdiv(K, BLOCK), groups, x.device)


def quantize_rows(x):
    """x (M, K) -> codes (M, K) E4M3, scales (ceil(K/128), M) FP32: one scale per token and 128 features."""
    if not use_kernels(x):
        return quantize_rows_reference(x)
    (M, K), x, out = x.shape, unit_stride(x), row_outputs(x)
    launch(quantize_rows_kernel, cdiv(M, 16) * cdiv(K, BLOCK), x, *out, cdiv(M, 4), M, K, x.stride(0),
           out[0].stride(0), 16, num_warps=4)
    return out


def quantize_rows_cols(x):
    """x (M, K) -> what quantize_rows gives, and codes (K, Mp) E4M3 of its transpose, scales (Mp/128, K): one
    per feature and 128 tokens. Mp is M rounded up to 128; padding is zeros. x is read once."""
    if not use_kernels(x):
        return quantize_rows_reference(x), quantize_cols_reference(x)
    (M, K), x, rows, groups = x.shape, unit_stride(x), row_outputs(x), cdiv(x.shape[0], BLOCK)
    cols = empty_codes(K, groups * BLOCK, x.device), empty_scales(groups, K, x.device)
    launch(quantize_rows_cols_kernel, groups * cdiv(K, BLOCK) * 8, x, *rows, *cols, cdiv(M, 4), M, K,
           x.stride(0), rows[0].stride(0), num_warps=2)
    return rows, cols


def quantize_cols(x):
    """The transpose's codes and scales of quantize_rows_cols alone."""
    return quantize_rows_cols(x)[1]


def quantize_blocks_t(x, row_scales, norm_w=None, rstd=None):
    """x (M, K) -> codes (K, Mp) E4M3 of its transpose, scales (ceil(K/128), Mp/128) FP32, one per 128x128
    block. With norm_w (K,), rstd (M,): of the output of that norm. row_scales (ceil(K/128), M) FP32 are what
    quantize_rows gives for these very values: the largest in a block is its own, a smaller one would
    overflow. (The reference takes the block's amax again: the same number.)"""
    if not use_kernels(x):
        return quantize_blocks_t_reference(x if rstd is None else norm_output_reference(x, rstd, norm_w))
    (M, K), x, out = x.shape, unit_stride(x), block_outputs_t(x)
    launch(quantize_blocks_t_kernel, cdiv(M, BLOCK) * cdiv(K, 64), x, norm_w, rstd, row_scales, *out,
           row_scales.stride(0) // 4, M, out[1].stride(0), K, x.stride(0), 64, num_warps=4)
    return out


def quantize_blocks(w, out=None):
    """w (N, K) -> codes (N, K) E4M3, scales (ceil(N/128), ceil(K/128)) FP32: one scale per 128x128 block.

    out=(codes, scales) writes in place: the addresses that CUDA graphs captured stay valid.
    """
    (N, K), w = w.shape, unit_stride(w)
    blocks = cdiv(N, BLOCK), cdiv(K, BLOCK)
    codes, scales = out or (empty_codes(N, K, w.device), torch.empty(blocks, device=w.device))
    if use_kernels(w):
        launch(quantize_blocks_kernel, blocks[0] * blocks[1], w, codes, scales, N, K,
               w.stride(0), codes.stride(0), num_warps=8)
    else:
        for mine, new in zip((codes, scales), quantize_blocks_reference(w)):
            mine.copy_(new)
    return codes, scales


def dequantize_blocks(codes, scales):
    """codes (N, K), scales (ceil(N/128), ceil(K/128)) -> FP32 (N, K)."""
    N, K = codes.shape
    return codes.float() * scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]


def transpose_codes(codes):
    """codes (N, K) -> (K, N), whose rows start on 16 bytes again."""
    N, K = codes.shape
    out = empty_codes(K, N, codes.device)
    if not use_kernels(codes):
        return out.copy_(codes.t())
    launch(transpose_kernel, cdiv(N, 128) * cdiv(K, 256), codes.view(torch.uint8), out.view(torch.uint8),
           N, K, codes.stride(0), out.stride(0), num_warps=16)
    return out


# ------------------------------------------------------------------------------------------------------------
# Products


def matmul_rows(x, w):
    """x (M, K), w (N, K) -> FP32 (M, N) = x w^T, in zero-padded blocks of 64 rows: a BLAS picks its kernel,
    and so the order of its sums, by the number of rows. Now a row depends on itself alone on a CPU, too."""
    M, K = x.shape
    x = F.pad(x.float(), (0, 0, 0, -M % 64))
    w = w.float().t()
    out = [x[i:i + 64].contiguous() @ w for i in range(0, M, 64)]
    return torch.cat(out)[:M] if out else x.new_zeros(0, w.shape[1])


def product_reference(a_codes, a_scales, b_codes, b_scales):
    """-> A B^T in FP32: codes (M, K) and (N, K), scales (K/128, M) and (N/128, K/128)."""
    a, b = a_codes.float(), b_codes.float()
    N, K = b.shape
    total = a.new_zeros(a.shape[0], N)
    for k in range(cdiv(K, BLOCK)):
        part = matmul_rows(a[:, k * BLOCK:(k + 1) * BLOCK], b[:, k * BLOCK:(k + 1) * BLOCK])
        total += part * (a_scales[k][:, None] * b_scales[:, k].repeat_interleave(BLOCK)[:N])
    return total


@jit
def tile_place(tile, m_tiles, n_tiles: tl.constexpr):
    """Row and column of a tile, counted in tiles. Eight rows of tiles march through the columns together, so
    that what they read stays in the L2 cache."""
    group = tile // (8 * n_tiles) * 8
    height = min(m_tiles - group, 8)
    inside = tile % (8 * n_tiles)
    return group + inside % height, inside // height


@jit(do_not_specialize=["M", "blocks", "a_quads", "b_scale_n", "b_scale_k"])
def plain_kernel(a_codes, b_codes, a_scales, b_scales, bias, out, M, blocks, a_quads, b_scale_n, b_scale_k,
                 N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
                 ADD: tl.constexpr):
    """One program computes a tile of ROWS x COLUMNS of out = A B^T + bias, or adds it to out (ADD).

    COLUMNS divides 128: within a tile and a block of K the scale of B is one number. SWAP computes B A^T: the
    same bits, but the tensor core's 64 rows or more are then those of B, and A's may be 16.
    """
    m0, n0 = tile_place(tl.program_id(0), tl.cdiv(M, ROWS), (N + COLUMNS - 1) // COLUMNS)
    m0, n0 = m0 * ROWS, n0 * COLUMNS
    m, n = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS) if SWAP else (ROWS, COLUMNS), tl.float32)
    for block in range(blocks):
        a = a_codes.load([m0, block * 128])
        b = b_codes.load([n0, block * 128])
        s = tl.load(a_scales + block * (a_quads * 4) + m, mask=m < M, other=0)
        s *= tl.load(b_scales + n0 // 128 * b_scale_n + block * b_scale_k)
        # Promotion: the tensor core starts from zero every 128 of K; one fma adds its sum to the FP32 total.
        if SWAP:
            total = tl.fma(tl.dot(b, a.T), s[None, :], total)
        else:
            total = tl.fma(tl.dot(a, b.T), s[:, None], total)

    if SWAP:
        total = total.T
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    offsets, mask = m[:, None].to(tl.int64) * N + n, (m[:, None] < M) & (n < N)
    if ADD:
        total += tl.load(out + offsets, mask=mask)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


# On Hopper, and for many rows, there is a faster kernel, with the bits of the one above, which remains the
# one to read (FProp on an H200, 8192 tokens, N = K = 4096: 1283 TFLOPS, the plain one 765). Plain Triton runs
# the same code in all warps of a program. Here they have roles:
#
#   loader, one warp             lets the TMA unit fill a ring of stages in shared memory, a tile's block of K
#                                each, and runs ahead as far as the ring is long
#   two consumers, 4 warps each  multiply and promote; while one promotes, the tensor core works for the other
#
# Two barriers a stage say whether it is full, and whether both consumers are done with it. A program stays on
# its SM and takes one tile after another, so the ring never runs dry between tiles. Tiles are 256x128, which
# takes the fewest loads of those that fit: a consumer has 128 rows, in two halves, and a thread holds 64
# values of each half's total and 64 of the product in flight, 192 of the 240 registers that it can have.

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    # Its name in triton 3.9, and the one before.
    tma_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    # Of a tile of codes, and of a line of scales, in shared memory.
    CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
except (ImportError, AttributeError):  # no triton, or one without Gluon or with other names in it
    gluon, gl = None, tl

RING = gl.constexpr(4)  # stages of 48 KB, in 227 KB of shared memory
HOPPER = "hopper"  # as the `tile` of a product: use this kernel
gluon_jit = functools.partial(jit, compiler=gluon)


@gluon_jit
def next_stage(stage, phase):
    """The stage of the ring after `stage`, and its barriers' phase, which flips with every round."""
    last = stage == RING - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon_jit
def load_tiles(a_codes, b_codes, a_scales, b_scales, ring, m_tiles, n_tiles: gl.constexpr, blocks,
               TURNED: gl.constexpr):
    """The loader: block after block of tile after tile, as stages of the ring become empty."""
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty = ring
    BYTES: gl.constexpr = (256 + 128) * 128 + (256 + 32) * 4
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_place(tile, m_tiles, n_tiles)
        for block in range(blocks):
            hopper.mbarrier.wait(empty.index(stage), phase ^ 1)  # the phase before the first counts as over
            ready = full.index(stage)
            hopper.mbarrier.expect(ready, BYTES)
            tma_load(a_codes, [m * 256, block * 128], ready, a_ring.index(stage))
            tma_load(b_codes, [n * 128, block * 128], ready, b_ring.index(stage))
            tma_load(a_scales, [block, m * 256], ready, a_scale_ring.index(stage))
            # TMA reads from 16 bytes on: of four scales of 128x128 blocks, one is ours.
            if TURNED:
                tma_load(b_scales, [block, n // 4 * 4], ready, b_scale_ring.index(stage))
            else:
                tma_load(b_scales, [n, block // 4 * 4], ready, b_scale_ring.index(stage))
            stage, phase = next_stage(stage, phase)


@gluon_jit
def promote(d, scales, total):
    """-> d, total + d times the scales of its rows.

    The empty instruction makes d depend on the sum, so that the next product can have d's registers. Without
    it the compiler looks for 64 others, which there are not: they spill.
    """
    total = gl.fma(d, scales[:, None], total)
    d = gl.inline_asm_elementwise("// $0 $1 $2", "=f,0,f", [d, total], dtype=gl.float32, is_pure=True, pack=1)
    return d, total


@gluon_jit
def store_half(total, out, bias, m0, n0, M, N: gl.constexpr, ADD: gl.constexpr):
    """Rows m0 .. m0 + 63 and columns n0 .. n0 + 127 of the result."""
    # A product lies two neighbours of a row a thread: enough for FP32. For BF16, eight, moved within a warp.
    layout: gl.constexpr = total.type.layout if ADD else gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128])
    m = m0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, 128, gl.SliceLayout(0, layout))
    at, mask = out + m[:, None].to(gl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
    if ADD:
        # The L2 cache adds, and nobody waits for what was there. That leaves no order open: a launch adds to
        # an element once. It is one rounding, as of a sum in a register, but takes subnormal numbers as zero.
        gl.atomic_add(at, total, mask=mask, sem="relaxed")
    else:
        if bias is not None:
            column = n0 + gl.arange(0, 128, gl.SliceLayout(0, total.type.layout))
            total += gl.load(bias + column, mask=column < N, other=0).to(gl.float32)[None, :]
        gl.store(at, gl.convert_layout(total.to(out.dtype.element_ty), layout), mask=mask)


@gluon_jit
def multiply_tiles(part: gl.constexpr, ring, bias, out, M, m_tiles, n_tiles: gl.constexpr, blocks,
                   N: gl.constexpr, ADD: gl.constexpr, TURNED: gl.constexpr):
    """A consumer: rows 128 part .. 128 part + 127 of tile after tile.

    Whatever can wait, or be done ahead, is done while one of its products runs: releasing the stage before,
    reading scales, waiting for the next stage. Of the 70 instructions between two products 64 promote.
    """
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    four: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    d = gl.zeros((64, 128), gl.float32, layout)
    stage, phase, previous = 0, 0, 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = tile_place(tile, m_tiles, n_tiles)
        upper, lower = gl.zeros((64, 128), gl.float32, layout), gl.zeros((64, 128), gl.float32, layout)
        hopper.mbarrier.wait(full.index(stage), phase)
        for block in range(blocks):
            a, b = a_ring.index(stage).slice(part * 128, 128), b_ring.index(stage)
            d = hopper.warpgroup_mma(a.slice(0, 64), b.permute((1, 0)), d, use_acc=False, is_async=True)
            # By now all that was read from the stage before has been used, scales included.
            hopper.mbarrier.arrive(empty.index(previous), pred=block > 0)
            a_scales = a_scale_ring.index(stage).reshape([256]).slice(part * 128, 128)
            s_upper, s_lower = a_scales.slice(0, 64).load(rows), a_scales.slice(64, 64).load(rows)
            b_scales = b_scale_ring.index(stage).reshape([32]).slice(0, 4).load(four)
            ours = gl.arange(0, 4, four) == (n if TURNED else block) % 4
            s = gl.sum(gl.where(ours, b_scales, 0.0), 0)
            s_upper, s_lower = s_upper * s, s_lower * s
            d = hopper.warpgroup_mma_wait(0, deps=(d,))
            d, upper = promote(d, s_upper, upper)
            d = hopper.warpgroup_mma(a.slice(64, 64), b.permute((1, 0)), d, use_acc=False, is_async=True)
            previous = stage
            stage, phase = next_stage(stage, phase)
            hopper.mbarrier.wait(full.index(stage), phase, pred=block + 1 < blocks)
            d = hopper.warpgroup_mma_wait(0, deps=(d,))
            d, lower = promote(d, s_lower, lower)
        hopper.mbarrier.arrive(empty.index(previous))
        store_half(upper, out, bias, m * 256 + part * 128, n * 128, M, N, ADD)
        store_half(lower, out, bias, m * 256 + part * 128 + 64, n * 128, M, N, ADD)


@gluon_jit(do_not_specialize=["M", "blocks"])
def product_kernel(a_codes, b_codes, a_scales, b_scales, bias, out, M, blocks, N: gl.constexpr,
                   ADD: gl.constexpr, TURNED: gl.constexpr):
    """out (M, N) = A B^T + bias, or out += A B^T, as in plain_kernel.

    TURNED: b_scales are (K/128, N/128) instead of (N/128, K/128), as DGrad has them.
    """
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, 256, 128], a_codes.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, 128, 128], b_codes.layout)
    a_scale_ring = gl.allocate_shared_memory(gl.float32, [RING, 1, 256], a_scales.layout)
    b_scale_ring = gl.allocate_shared_memory(gl.float32, [RING, 1, 32], b_scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    ring = a_ring, b_ring, a_scale_ring, b_scale_ring, full, empty
    m_tiles = (M + 255) // 256
    n_tiles: gl.constexpr = (N + 127) // 128
    gl.warp_specialize([
        (multiply_tiles, (0, ring, bias, out, M, m_tiles, n_tiles, blocks, N, ADD, TURNED)),
        (multiply_tiles, (1, ring, bias, out, M, m_tiles, n_tiles, blocks, N, ADD, TURNED)),
        (load_tiles, (a_codes, b_codes, a_scales, b_scales, ring, m_tiles, n_tiles, blocks, TURNED)),
    ], [4, 1], [240, 24])


def product_hopper(a_codes, a_scales, b_codes, b_scales, bias, out, add):
    """Launch product_kernel."""
    M, N, blocks = a_codes.shape[0], b_codes.shape[0], a_scales.shape[0]
    turned = b_scales.stride(1) != 1
    if turned:
        b_scales = b_scales.t()
    if b_scales.stride(1) != 1 or b_scales.stride(0) % 4 or b_scales.data_ptr() % 16:  # no lines for TMA
        b_scales = empty_scales(*b_scales.shape, b_scales.device).copy_(b_scales)
    launch(product_kernel, min(cdiv(M, 256) * cdiv(N, BLOCK), multiprocessors(out.device)),
           GluonDescriptor.from_tensor(a_codes, [256, BLOCK], CODES_LAYOUT),
           GluonDescriptor.from_tensor(b_codes, [BLOCK, BLOCK], CODES_LAYOUT),
           GluonDescriptor.from_tensor(a_scales, [1, 256], SCALES_LAYOUT),
           GluonDescriptor.from_tensor(b_scales, [1, 32], SCALES_LAYOUT),
           bias, out, M, blocks, N, add, turned, num_warps=4, maxnreg=168)


@functools.cache
def multiprocessors(device):
    """How many the GPU has, if it is a Hopper and triton has Gluon; else 0."""
    if gluon is None or INTERPRET or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


# With few tokens, as in decode, the work is to read W: many loads have to be under way, on all
# multiprocessors. Hence another kernel, whose tiles are narrow, so that there are enough for all, and with
# several blocks of K in a stage: products so small would otherwise take less time than the barriers. W has a
# loader of its own: in a decode step it fills the ring while the kernel before, which makes X, still works.
# Each 64 tokens of a tile have a consumer.

DECODE_TILES = {
    # (tokens, features): (blocks of K in a stage, stages, relative time of a block of K). The stages take
    # 200 KB or so. The times fit an H200: loading tokens + features counts, and in the last the products too.
    (64, 32): (4, 4, 96),
    (64, 64): (4, 3, 128),
    (64, 128): (2, 4, 192),
    (128, 128): (2, 3, 300),
}
HOPPER_TIME = 580  # the same of product_kernel's tile


@gluon_jit
def decode_place(tile, M, TOKENS: gl.constexpr, FEATURES: gl.constexpr):
    """First token and first feature of a tile.

    The last tile of tokens reaches back into its neighbour rather than beyond M, where TMA has zeros to fill
    in, which is slow. What both compute are the same bits. As TMA reads scales from 16 bytes on, tiles start
    on a multiple of 4 tokens.
    """
    m_tiles = (M + TOKENS - 1) // TOKENS
    m0 = gl.maximum(gl.minimum(tile % m_tiles * TOKENS, (M + 3) // 4 * 4 - TOKENS), 0)
    return m0, tile // m_tiles * FEATURES


@gluon_jit
def decode_load(OF_W: gl.constexpr, x_codes, w_codes, x_scales, ring, tiles, M, K: gl.constexpr):
    """The loader of W, which waits for no kernel ahead, or of X: a block fills the first rows of its place;
    those beyond M are noise."""
    x_ring, w_ring, scale_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    STEP: gl.constexpr = x_ring.shape[0] // STAGES
    BYTES: gl.constexpr = w_codes.block_type.nbytes if OF_W else (x_codes.block_type.nbytes
                                                                  + x_scales.block_type.nbytes)
    if not OF_W:
        tl.extra.cuda.gdc_wait()  # what wait_for_inputs says; y is written when X has been read
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0 = decode_place(tile, M, x_ring.shape[1], w_ring.shape[1])
        for block in range(0, (K + 127) // 128, STEP):
            stage = i % STAGES
            hopper.mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
            ready = full.index(stage)
            hopper.mbarrier.expect(ready, STEP * BYTES)
            for j in gl.static_range(STEP):
                at = stage * STEP + j
                if OF_W:
                    tma_load(w_codes, [n0, (block + j) * 128], ready, w_ring.index(at))
                else:
                    x = x_ring.index(at).slice(0, x_codes.block_shape[0])
                    tma_load(x_codes, [m0, (block + j) * 128], ready, x)
                    tma_load(x_scales, [block + j, m0], ready, scale_ring.index(at))
            i += 1
    if not OF_W:
        tl.extra.cuda.gdc_launch_dependents()  # start_next; at the top a step at 8B took 3 % longer


@gluon_jit
def decode_w_scales(w_scales, block, K: gl.constexpr, W_SCALE_K: gl.constexpr, STEP: gl.constexpr):
    """The scales of STEP blocks of W, 0 beyond K: there codes are loaded as zeros, and add 0 to a total."""
    scales = ()
    for j in gl.static_range(STEP):
        scales += (gl.load(w_scales + (block + j) * W_SCALE_K, mask=(block + j) * 128 < K, other=0),)
    return scales


@gluon_jit
def decode_multiply(part: gl.constexpr, ring, w_scales, bias, y, tiles, M, N: gl.constexpr, K: gl.constexpr,
                    W_SCALE_N: gl.constexpr, W_SCALE_K: gl.constexpr):
    """A consumer: tokens 64 part .. 64 part + 63 of tile after tile."""
    x_ring, w_ring, scale_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    STEP: gl.constexpr = x_ring.shape[0] // STAGES
    FEATURES: gl.constexpr = w_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, FEATURES, 32])
    # Of the result a thread stores eight neighbours of a row, 16 bytes in BF16.
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // FEATURES, FEATURES // 8], [4, 1], [1, 0])
    zeros = gl.zeros((64, FEATURES), gl.float32, layout)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0 = decode_place(tile, M, x_ring.shape[1], FEATURES)
        w_line = w_scales + n0 // 128 * W_SCALE_N
        w_scale = decode_w_scales(w_line, 0, K, W_SCALE_K, STEP)
        total = zeros
        for block in range(0, (K + 127) // 128, STEP):
            stage = i % STAGES
            hopper.mbarrier.wait(full.index(stage), i // STAGES & 1)
            products, scales = (), ()
            for j in gl.static_range(STEP):  # all started at once: while one is promoted, the next ones run
                at = stage * STEP + j
                x, w = x_ring.index(at).slice(64 * part, 64), w_ring.index(at).permute((1, 0))
                products += (hopper.warpgroup_mma(x, w, zeros, use_acc=False, is_async=True),)
                x_scale = scale_ring.index(at).slice(64 * part, 64, 1).permute((1, 0)).load(layout)
                scales += (x_scale * w_scale[j],)
            w_scale = decode_w_scales(w_line, block + STEP, K, W_SCALE_K, STEP)
            for j in gl.static_range(STEP):
                product = hopper.warpgroup_mma_wait(STEP - 1 - j, deps=(products[j],))
                scale, product = gl.broadcast(scales[j], product)
                total = gl.fma(product, scale, total)
            hopper.mbarrier.arrive(empty.index(stage))
            i += 1
        if bias is not None:
            n = n0 + gl.arange(0, FEATURES, gl.SliceLayout(0, layout))
            total += gl.load(bias + n, mask=n < N, other=0).to(gl.float32)[None, :]
        m = m0 + 64 * part + gl.arange(0, 64, gl.SliceLayout(1, lines))
        n = n0 + gl.arange(0, FEATURES, gl.SliceLayout(0, lines))
        at, mask = y + m[:, None].to(gl.int64) * N + n[None, :], (m[:, None] < M) & (n[None, :] < N)
        gl.store(at, gl.convert_layout(total.to(y.dtype.element_ty), lines), mask=mask)


@gluon_jit(do_not_specialize=["M"])
def decode_kernel(x_codes, w_codes, x_scales, w_scales, bias, y, M, N: gl.constexpr, K: gl.constexpr,
                  W_SCALE_N: gl.constexpr, W_SCALE_K: gl.constexpr, TOKENS: gl.constexpr,
                  FEATURES: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """Y = X W^T + bias as in plain_kernel; STAGES stages with STEP blocks of K each."""
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * STEP, TOKENS, 128], x_codes.layout)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * STEP, FEATURES, 128], w_codes.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES * STEP, 1, TOKENS], x_scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=2)
        hopper.mbarrier.init(empty.index(i), count=TOKENS // 64)
    hopper.fence_async_shared()
    ring = x_ring, w_ring, scale_ring, full, empty
    tiles = (M + TOKENS - 1) // TOKENS * ((N + FEATURES - 1) // FEATURES)
    if TOKENS == 64:
        gl.warp_specialize([
            (decode_multiply, (0, ring, w_scales, bias, y, tiles, M, N, K, W_SCALE_N, W_SCALE_K)),
            (decode_load, (True, x_codes, w_codes, x_scales, ring, tiles, M, K)),
            (decode_load, (False, x_codes, w_codes, x_scales, ring, tiles, M, K)),
        ], [1, 1], [24, 24])
    else:
        gl.warp_specialize([
            (decode_multiply, (0, ring, w_scales, bias, y, tiles, M, N, K, W_SCALE_N, W_SCALE_K)),
            (decode_multiply, (1, ring, w_scales, bias, y, tiles, M, N, K, W_SCALE_N, W_SCALE_K)),
            (decode_load, (True, x_codes, w_codes, x_scales, ring, tiles, M, K)),
            (decode_load, (False, x_codes, w_codes, x_scales, ring, tiles, M, K)),
        ], [4, 1, 1], [240, 24, 24])


def decode_product(x_codes, x_scales, w_codes, w_scales, bias, y, tile):
    """Launch decode_kernel with one of DECODE_TILES."""
    (M, N), K, (tokens, features), (step, stages, _) = y.shape, w_codes.shape[1], tile, DECODE_TILES[tile]
    rows = min(tokens, max(8, triton.next_power_of_2(M)))  # of X to load: few of them zeros
    launch(decode_kernel, min(cdiv(M, tokens) * cdiv(N, features), multiprocessors(y.device)),
           GluonDescriptor.from_tensor(x_codes, [rows, BLOCK], CODES_LAYOUT),
           GluonDescriptor.from_tensor(w_codes, [features, BLOCK], CODES_LAYOUT),
           GluonDescriptor.from_tensor(x_scales, [1, tokens], SCALES_LAYOUT),
           w_scales, bias, y, M, N, K, *w_scales.stride(), tokens, features, step, stages,
           num_warps=4, maxnreg=168, waits=True)


SQUARE = 128, 128, False, 8, 4  # (rows, columns, swap, warps, stages) of plain_kernel for many rows


def plain_tile(M):
    """The same for M rows. A few are bound by reading B, so many narrow programs and deep pipelines keep many
    loads in flight; with many the square tile reuses most."""
    if M > 128:
        return SQUARE
    rows = 16 if M <= 16 else 32 if M <= 32 else 64
    return rows, 64, True, 4, 8 if rows < 64 else 6


def fprop_tile(M, N, device):
    """The kernel and its tile: HOPPER, one of DECODE_TILES, or a `plain_tile`. Any choice gives the same
    bits, this one is for speed: on a Hopper GPU, the one that is through first if every multiprocessor takes
    one tile after another."""
    processors = multiprocessors(device)
    if processors:
        rounds = lambda tokens, features: cdiv(cdiv(M, tokens) * cdiv(N, features), processors)
        times = {tile: rounds(*tile) * time for tile, (_, _, time) in DECODE_TILES.items()}
        times[HOPPER] = rounds(256, 128) * HOPPER_TIME
        return min(times, key=times.get)
    return plain_tile(M)


def fprop(x_codes, x_scales, w_codes, w_scales, bias=None, dtype=torch.bfloat16, tile=None):
    """Y = X W^T: codes (M, K) and (N, K), scales (K/128, M) and (N/128, K/128), bias (N,) -> `dtype` (M, N).

    DGrad is the same product: dX = dY W takes dY as X, and the transposed codes and scales of W as W. `tile`
    overrides fprop_tile, for tests and benchmarks.
    """
    if not use_kernels(x_codes):
        y = product_reference(x_codes, x_scales, w_codes, w_scales)
        return (y if bias is None else y + bias.float()).to(dtype)
    y = torch.empty(x_codes.shape[0], w_codes.shape[0], dtype=dtype, device=x_codes.device)
    if len(y):
        tile = tile or fprop_tile(*y.shape, y.device)
        product(x_codes, x_scales, w_codes, w_scales, bias, y, False, tile)
    return y


def wgrad(dyt_codes, dyt_scales, xt_codes, xt_scales, out, tile=None):
    """out (N, K) FP32 += dY^T X: codes (N, Mp) and (K, Mp), scales (Mp/128, N) and (K/128, Mp/128).

    `tile`, for tests and benchmarks: HOPPER, or one of plain_kernel. The bits are the same, but HOPPER takes
    subnormal numbers, those below 2^-126, as zero.
    """
    if not use_kernels(out):
        out += product_reference(dyt_codes, dyt_scales, xt_codes, xt_scales)
    elif len(dyt_scales):
        # Where product_kernel's tiles fill less than half of the GPU, plain_kernel has twice as many.
        N, K = out.shape
        fills = 0 < multiprocessors(out.device) <= 2 * cdiv(N, 256) * cdiv(K, BLOCK)
        product(dyt_codes, dyt_scales, xt_codes, xt_scales, None, out, True,
                tile or (HOPPER if fills else SQUARE))


def product(a_codes, a_scales, b_codes, b_scales, bias, out, add, tile):
    """out = A B^T + bias, or out += A B^T (add), by the kernel that `tile` names."""
    if tile == HOPPER:
        product_hopper(a_codes, a_scales, b_codes, b_scales, bias, out, add)
    elif tile in DECODE_TILES:
        decode_product(a_codes, a_scales, b_codes, b_scales, bias, out, tile)
    else:
        (M, N), (rows, columns, swap, warps, stages) = out.shape, tile
        launch(plain_kernel, cdiv(M, rows) * cdiv(N, columns),
               TensorDescriptor.from_tensor(a_codes, [rows, BLOCK]),
               TensorDescriptor.from_tensor(b_codes, [columns, BLOCK]),
               a_scales, b_scales, bias, out, M, len(a_scales), a_scales.stride(0) // 4, *b_scales.stride(),
               N, rows, columns, swap, add, num_warps=warps, num_stages=stages)


# ------------------------------------------------------------------------------------------------------------
# Weights


class Weight(nn.Module):
    """A tensor to learn, as the forward pass reads it. keep: "data" (dtype), "codes" (with scales), "both".

    Not an nn.Parameter: FP8 codes cannot carry a gradient, and the full-precision master belongs to the
    optimizer. The backward functions below add to `grad` (FP32, `shape`) themselves. Writes keep the
    addresses, which captured CUDA graphs read.
    """

    def __init__(self, shape, dtype=torch.bfloat16, device=None, keep="data"):
        super().__init__()
        self.shape, self.grad = torch.Size(shape), None
        data, codes, blocks = keep != "codes", keep != "data", [cdiv(n, BLOCK) for n in shape]
        self.register_buffer("data", torch.zeros(shape, dtype=dtype, device=device) if data else None)
        self.register_buffer("codes", empty_codes(*shape, device).zero_() if codes else None)
        self.register_buffer("scales", torch.ones(blocks, device=device) if codes else None)

    def write(self, full):
        """Take new values, in place. With both kept, the codes are those of the rounded data."""
        if full.shape != self.shape:
            raise ValueError(f"Weight.write: got {tuple(full.shape)}, this weight is {tuple(self.shape)}")
        if self.data is not None:
            self.data.copy_(full)
            full = self.data
        if self.codes is not None:
            quantize_blocks(full.to(self.codes.device), out=(self.codes, self.scales))

    def full(self):
        """The FP32 values that the forward pass sees."""
        return self.data.float() if self.data is not None else dequantize_blocks(self.codes, self.scales)

    def gradient(self):
        """`grad`, allocated as zeros on first use."""
        if self.grad is None:
            device = (self.codes if self.data is None else self.data).device
            self.grad = torch.zeros(self.shape, dtype=torch.float32, device=device)
        return self.grad

    def add_grad(self, g):
        self.gradient().add_(g)


# ------------------------------------------------------------------------------------------------------------
# Ordered sums, for gradients of biases and norm weights


@jit(do_not_specialize=["M"])
def sum_rows_kernel(x, out, M, C: tl.constexpr, X_LINE: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr):
    """One program sums CHUNK rows of 32 columns of x, in ascending steps of 256; ADD: onto what out holds."""
    c = tl.program_id(0) % tl.cdiv(C, 32) * 32 + tl.arange(0, 32)
    chunk = tl.program_id(0) // tl.cdiv(C, 32)
    total = tl.zeros((256, 32), tl.float32)
    for row in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, M), 256):
        m = row + tl.arange(0, 256)[:, None]
        total += tl.load(x + m.to(tl.int64) * X_LINE + c, mask=(m < M) & (c < C), other=0).to(tl.float32)
    out += chunk * C + c
    total = tl.sum(total, 0)
    if ADD:
        total += tl.load(out, mask=c < C)
    tl.store(out, total, mask=c < C)


def sum_rows(x, out):
    """out (C,) FP32 += sum of the rows of x (M, C), in an order that depends on M alone."""
    if not use_kernels(x):
        out += x.float().sum(0)
        return
    (M, C), x, chunk = x.shape, unit_stride(x), 1024
    while M > chunk:  # partial sums of 1,024 rows, side by side on the GPU, then the sum of those
        partial = torch.empty(cdiv(M, chunk), C, device=x.device)
        launch(sum_rows_kernel, cdiv(C, 32) * len(partial), x, partial, M, C, x.stride(0), chunk, False,
               num_warps=8)
        x, M = partial, len(partial)
    launch(sum_rows_kernel, cdiv(C, 32), x, out, M, C, x.stride(0), chunk, True, num_warps=8)


# ------------------------------------------------------------------------------------------------------------
# Residual sum and RMSNorm, fused with the quantizer


def norm_reference(h, delta, w, eps):
    """-> h_new (M, C), rstd (M,) FP32, y (M, C)."""
    if delta is not None:
        h = (h.float() + delta.float()).to(h.dtype)
    x = h.float().contiguous()  # the norm sees the rounded sum, the value that the backward pass will find
    rstd = 1 / sqrt_reference(x.square().sum(-1) / x.shape[1] + eps)
    return h, rstd, norm_output_reference(h, rstd, w)


def norm_output_reference(h, rstd, w):
    return (h.float() * rstd[:, None] * w.float()).to(h.dtype)


def norm_backward_reference(dy, dh, h, rstd, w):
    """-> dh plus the gradient through the norm (M, C), rounded once; gradient of w (C,)."""
    g, xhat = dy.float() * w.float(), h.float() * rstd[:, None]
    dx = rstd[:, None] * (g - xhat * ((g * xhat).sum(-1, keepdim=True) / h.shape[1]))
    return (dh.float() + dx).to(h.dtype), (dy.float() * xhat).sum(0)


@jit(do_not_specialize=["quads"])
def norm_kernel(h, delta, w, h_new, rstd, y, codes, scales, quads, eps,
                C: tl.constexpr, GROUPS: tl.constexpr, CODES_LINE: tl.constexpr):
    """One program norms a row, held as (GROUPS, 128): h_new = h + delta, y = h_new rstd w or its codes."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    c = group[:, None] * 128 + tl.arange(0, 128)
    start_next()
    weight = tl.load(w + c, mask=c < C, other=0).to(tl.float32)
    wait_for_inputs()
    x = tl.load(h + row * C + c, mask=c < C, other=0).to(tl.float32)
    if delta is not None:
        x += tl.load(delta + row * C + c, mask=c < C, other=0).to(tl.float32)
        rounded = x.to(h.dtype.element_ty)
        tl.store(h_new + row * C + c, rounded, mask=c < C)
        x = rounded.to(tl.float32)
    mean = tl.div_rn(tl.sum(tl.sum(x * x, 1), 0), C * 1.0)
    r = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + row, r)
    out = (x * r * weight).to(h.dtype.element_ty)
    if codes is None:
        tl.store(y + row * C + c, out, mask=c < C)
    else:
        q, s = encode(out.to(tl.float32))
        tl.store(codes + row * CODES_LINE + c, q, mask=c < C)
        tl.store(scales + group * (quads * 4) + row, s, mask=group * 128 < C)


@jit(do_not_specialize=["M", "rows"])
def norm_backward_kernel(dy, dh, h, rstd, w, dx, partial, M, rows, C: tl.constexpr, GROUPS: tl.constexpr):
    """One program takes `rows` rows in turn: dx = dh + rstd (g - xhat mean(g xhat)), g = dy w, xhat = h rstd.

    The gradient of w sums dy xhat over the program's rows, in registers, into its line of `partial`. While a
    row is worked on, the next two are on their way (num_stages).
    """
    c = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)
    weight = tl.load(w + c, mask=c < C, other=0).to(tl.float32)
    dw = tl.zeros((GROUPS, 128), tl.float32)
    first = tl.program_id(0) * rows
    for i in tl.range(min(rows, M - first), num_stages=3):
        offsets = first.to(tl.int64) * C + (i * C + c)
        r = tl.load(rstd + first + i)
        xhat = tl.load(h + offsets, mask=c < C, other=0).to(tl.float32) * r
        grad = tl.load(dy + offsets, mask=c < C, other=0).to(tl.float32)
        rest = tl.load(dh + offsets, mask=c < C, other=0).to(tl.float32)
        dw += grad * xhat
        g = grad * weight
        mean = tl.div_rn(tl.sum(tl.sum(g * xhat, 1), 0), C * 1.0)
        # The residual's gradient is added in FP32: one rounding on the way down the residual stream.
        out = rest + r * (g - xhat * mean)
        tl.store(dx + offsets, out.to(dx.dtype.element_ty), mask=c < C)
    tl.store(partial + tl.program_id(0).to(tl.int64) * C + c, dw, mask=c < C)


def norm_config(C):
    """(groups of 128, up to a power of two; warps) for rows of width C, which alone decides."""
    groups = triton.next_power_of_2(cdiv(C, BLOCK))
    return groups, max(1, min(16, groups // 4))


def aligned(x):
    """x with contiguous rows that start on 16 bytes: otherwise loads, and so the order of a sum, change."""
    fits = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def norm_forward(h, delta, w, eps, quantize):
    """-> h_new, rstd, and y (M, C), which is row-wise (codes, scales) when `quantize`."""
    if not use_kernels(h):
        h, rstd, y = norm_reference(h, delta, w.data, eps)
        return h, rstd, quantize_rows(y) if quantize else y
    (M, C), h = h.shape, aligned(h)
    groups, warps = norm_config(C)
    h_new = h if delta is None else torch.empty_like(h)
    rstd = torch.empty(M, dtype=torch.float32, device=h.device)
    y, codes, scales = (None, *row_outputs(h)) if quantize else (torch.empty_like(h), None, None)
    launch(norm_kernel, M, h, None if delta is None else aligned(delta), w.data, h_new, rstd, y, codes,
           scales, cdiv(M, 4), eps, C, groups, round_up(C, 16), num_warps=warps, waits=True)
    return h_new, rstd, (codes, scales) if quantize else y


def norm_operand(h, rstd, w, eps, row_scales):
    """The norm's output once more, as WGrad reads it: by quantize_blocks_t, or (M, C) without row_scales."""
    if row_scales is None:
        return norm_forward(h, None, w, eps, quantize=False)[2]
    return quantize_blocks_t(h, row_scales, w.data, rstd)


def norm_backward(dy, dh, h, rstd, w):
    """Gradients of y = h rstd w: returns dh plus its gradient through the norm; adds to w.grad."""
    if not use_kernels(h):
        dx, dw = norm_backward_reference(dy, dh, h, rstd, w.data)
        w.add_grad(dw)
        return dx
    (M, C), rows = h.shape, max(1, cdiv(h.shape[0], 512))  # 512 programs: a GPU is full, sum_rows is quick
    groups, warps = norm_config(C)
    dx, partial = torch.empty_like(h), torch.empty(cdiv(M, rows), C, dtype=torch.float32, device=h.device)
    launch(norm_backward_kernel, len(partial), aligned(dy), aligned(dh), h, rstd, w.data, dx, partial, M,
           rows, C, groups, num_warps=warps)
    sum_rows(partial, w.gradient())
    return dx


# ------------------------------------------------------------------------------------------------------------
# SwiGLU, fused with the quantizer


def swiglu_reference(gate_up):
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * (1 / (1 + torch.exp(-gate))) * up).to(gate_up.dtype)


def swiglu_backward_reference(dy, gate_up):
    gate, up = gate_up.float().chunk(2, -1)
    s = 1 / (1 + torch.exp(-gate))
    d_gate = dy.float() * up * (s * (1 + gate * (1 - s)))
    return torch.cat((d_gate, dy.float() * (gate * s)), -1).to(gate_up.dtype)


@jit
def sigmoid(x):
    return tl.div_rn(1.0, 1 + tl.exp(-x))


@jit(do_not_specialize=["M", "quads"])
def swiglu_kernel(gate_up, y, codes, scales, quads, M,
                  K: tl.constexpr, CODES_LINE: tl.constexpr, TILE: tl.constexpr):
    """One program computes silu(gate) up for TILE tokens by 128 features, and stores it or its codes."""
    blocks: tl.constexpr = (K + 127) // 128
    i, j = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    m, k = i * TILE + tl.arange(0, TILE), j * 128 + tl.arange(0, 128)
    mask = (m[:, None] < M) & (k < K)
    start_next()
    wait_for_inputs()
    source = gate_up + m[:, None].to(tl.int64) * (2 * K) + k
    gate = tl.load(source, mask=mask, other=0).to(tl.float32)
    out = gate * sigmoid(gate) * tl.load(source + K, mask=mask, other=0).to(tl.float32)
    out = out.to(gate_up.dtype.element_ty)  # rounded first: the value that WGrad's operand is made from
    if codes is None:
        tl.store(y + m[:, None].to(tl.int64) * K + k, out, mask=mask)
    else:
        store_rows(out.to(tl.float32), codes, scales, quads, j, m, k, M, K, CODES_LINE)


@jit
def swiglu_backward_tile(dy, gate_up, d_gate_up, m, k, left, right, K: tl.constexpr):
    """Stores the gradients of gate and up for tokens m, of which `left` are there, and features k, of which
    `right` are; returns the product once more."""
    mask = (m[:, None] < left) & (k < right)
    narrow, wide = m[:, None] * K + k, m[:, None] * (2 * K) + k
    gate = tl.load(gate_up + wide, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + wide + K, mask=mask, other=0).to(tl.float32)
    d = tl.load(dy + narrow, mask=mask, other=0).to(tl.float32)
    s = sigmoid(gate)
    dtype = gate_up.dtype.element_ty
    tl.store(d_gate_up + wide, (d * up * (s * (1 + gate * (1 - s)))).to(dtype), mask=mask)
    tl.store(d_gate_up + wide + K, (d * (gate * s)).to(dtype), mask=mask)
    return (gate * s * up).to(dtype)  # as the forward kernel computes it, to the bit


@jit(do_not_specialize=["M", "quads", "scales_line"])
def swiglu_backward_kernel(dy, gate_up, d_gate_up, y, row_scales, codes_t, scales_t, M, quads, scales_line,
                           K: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Gradients of gate and up for TILE tokens by WIDTH features; and the product once more, for WGrad, as
    its factors are at hand: as quantize_blocks_t_kernel writes it (TILE is 128 then), or y."""
    i, j = tl.program_id(0) // tl.cdiv(K, WIDTH), tl.program_id(0) % tl.cdiv(K, WIDTH)
    left, right = M - i * TILE, K - j * WIDTH
    dy += i.to(tl.int64) * (TILE * K) + j * WIDTH
    gate_up += i.to(tl.int64) * (2 * TILE * K) + j * WIDTH
    d_gate_up += i.to(tl.int64) * (2 * TILE * K) + j * WIDTH
    if codes_t is None:
        m, k = tl.arange(0, TILE), tl.arange(0, WIDTH)
        out = swiglu_backward_tile(dy, gate_up, d_gate_up, m, k, left, right, K)
        y += i.to(tl.int64) * (TILE * K) + j * WIDTH
        tl.store(y + (m[:, None] * K + k), out, mask=(m[:, None] < left) & (k < right))
    else:
        m, k = 2 * tl.arange(0, 64), tl.arange(0, WIDTH)
        x0 = swiglu_backward_tile(dy, gate_up, d_gate_up, m, k, left, right, K)
        x1 = swiglu_backward_tile(dy, gate_up, d_gate_up, m + 1, k, left, right, K)
        scale = block_scale(row_scales, quads, scales_t, scales_line, M, i, j * WIDTH)
        tile = tl.join(x0, x1).to(tl.float32)
        store_transposed(tile, scale, codes_t, tl.cdiv(M, 128), i, k + j * WIDTH, K)


def swiglu_forward(gate_up, quantize):
    """gate_up (M, 2K) -> silu(gate) up (M, K), or row-wise (codes, scales) of that when `quantize`."""
    if not use_kernels(gate_up):
        y = swiglu_reference(gate_up)
        return quantize_rows(y) if quantize else y
    gate = gate_up.chunk(2, 1)[0]
    M, K = gate.shape
    y, codes, scales = (None, *row_outputs(gate)) if quantize else (gate.new_empty(M, K), None, None)
    launch(swiglu_kernel, cdiv(M, 4) * cdiv(K, BLOCK), gate_up.contiguous(), y, codes, scales, cdiv(M, 4), M,
           K, round_up(K, 16), 4, num_warps=1, waits=True)
    return (codes, scales) if quantize else y


def swiglu_backward(dy, gate_up, row_scales):
    """dy (M, K), gate_up (M, 2K), row-wise scales of silu(gate) up -> the gradient of gate_up (M, 2K), and
    silu(gate) up as WGrad reads it: by quantize_blocks_t, or (M, K) if row_scales is None."""
    quantize = row_scales is not None
    if not use_kernels(dy):
        y = swiglu_reference(gate_up)
        return swiglu_backward_reference(dy, gate_up), quantize_blocks_t(y, row_scales) if quantize else y
    (M, K), gate_up, dy = dy.shape, gate_up.contiguous(), dy.contiguous()
    d_gate_up, (tile, width, warps) = torch.empty_like(gate_up), (128, 64, 8) if quantize else (16, 128, 4)
    y, codes, scales = (None, *block_outputs_t(dy)) if quantize else (torch.empty_like(dy), None, None)
    quads, scales_line = (row_scales.stride(0) // 4, scales.stride(0)) if quantize else (0, 0)
    launch(swiglu_backward_kernel, cdiv(M, tile) * cdiv(K, width), dy, gate_up, d_gate_up, y, row_scales,
           codes, scales, M, quads, scales_line, K, tile, width, num_warps=warps)
    return d_gate_up, (codes, scales) if quantize else y


# ------------------------------------------------------------------------------------------------------------
# Linear layers with gradients


def forward_product(x, w, bias, fp8, dtype):
    """x W^T + bias, x being (codes, scales) when `fp8`."""
    b = None if bias is None else bias.data
    if fp8:
        return fprop(*x, w.codes, w.scales, b, dtype)
    if x.is_cuda:
        return F.linear(x, w.data, b)
    y = matmul_rows(x, w.data)
    return (y if b is None else y + b.float()).to(dtype)


def backward_input(dy, w, bias, fp8):
    """-> dX = dY W; dY as WGrad reads it: (codes, scales) of its transpose when `fp8`. Adds to bias.grad."""
    dy = dy.contiguous()
    if bias is not None:
        sum_rows(dy, bias.gradient())
    if fp8:
        rows, cols = quantize_rows_cols(dy)
        return fprop(*rows, transpose_codes(w.codes), w.scales.t(), dtype=dy.dtype), cols
    return (dy @ w.data if dy.is_cuda else matmul_rows(dy, w.data.t()).to(dy.dtype)), dy


def backward_weight(dy, x, w, fp8):
    """w.grad += dY^T X, both as WGrad reads them."""
    if fp8:
        wgrad(*dy, *x, w.gradient())
    else:
        add_product(w.gradient(), dy.t(), x)


def add_product(out, a, b):
    """out += a b in FP32, in place: a head's gradient is gigabytes, too much for a temporary."""
    if a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)  # BF16 in, but FP32 out
    else:
        out.addmm_(a.float(), b.float())


# One autograd function for each way that a layer gets its input. It saves BF16 tensors that exist anyway, and
# no codes: WGrad's operand is made from those, with the help of the row-wise scales, and the forward pass is
# the sampler's own.


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, fp8):
        operand = quantize_rows(x) if fp8 else x
        ctx.save_for_backward(x, operand[1] if fp8 else None)
        ctx.args = w, bias, fp8
        return forward_product(operand, w, bias, fp8, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x, row_scales), (w, bias, fp8) = ctx.saved_tensors, ctx.args
        dx, dy = backward_input(dy, w, bias, fp8)
        backward_weight(dy, quantize_blocks_t(x, row_scales) if fp8 else x, w, fp8)
        return dx, None, None, None


class NormLinearFunction(torch.autograd.Function):
    """The norm alone where w is None."""

    @staticmethod
    def forward(ctx, h, delta, norm_w, eps, w, bias, fp8):
        h_new, rstd, y = norm_forward(h, delta, norm_w, eps, quantize=fp8)
        ctx.save_for_backward(h_new, rstd, y[1] if fp8 else None)
        ctx.args = norm_w, eps, w, bias, fp8, delta is not None
        if w is not None:
            y = forward_product(y, w, bias, fp8, h.dtype)
        return h_new if delta is not None else h_new.view_as(h_new), y  # an input is not returned as it is

    @staticmethod
    def backward(ctx, dh, dy):
        h, rstd, row_scales = ctx.saved_tensors
        norm_w, eps, w, bias, fp8, has_delta = ctx.args
        if w is not None:
            dy, operand = backward_input(dy, w, bias, fp8)
            backward_weight(operand, norm_operand(h, rstd, norm_w, eps, row_scales), w, fp8)
        dh = norm_backward(dy, dh, h, rstd, norm_w)
        return dh, dh if has_delta else None, None, None, None, None, None


class SwigluLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, w, fp8):
        operand = swiglu_forward(gate_up, quantize=fp8)
        ctx.save_for_backward(gate_up, operand[1] if fp8 else None)
        ctx.args = w, fp8
        return forward_product(operand, w, None, fp8, gate_up.dtype)

    @staticmethod
    def backward(ctx, dy):
        (gate_up, row_scales), (w, fp8) = ctx.saved_tensors, ctx.args
        # DGrad first: the kernel that turns it into the gradient of gate_up also writes WGrad's operand.
        dx, dy = backward_input(dy, w, None, fp8)
        d_gate_up, x = swiglu_backward(dx, gate_up, row_scales)
        backward_weight(dy, x, w, fp8)
        return d_gate_up, None, None


def norm(h, delta, w, eps):
    """h_new = h + delta (delta None: h), y = rmsnorm(h_new) w: (M, C) each, both rounded to h.dtype once."""
    return NormLinearFunction.apply(h, delta, w, eps, None, None, False)


def norm_linear(h, delta, norm_w, eps, w, bias=None, fp8=False):
    """-> h_new as by `norm`, y = linear(its output, w, bias) (M, N); in FP8 the norm writes codes itself."""
    return NormLinearFunction.apply(h, delta, norm_w, eps, w, bias, fp8)


def swiglu_linear(gate_up, w, fp8=False):
    """gate_up (M, 2K) -> linear(silu(gate) * up, w) (M, N); in FP8 the product goes straight to codes."""
    return SwigluLinearFunction.apply(gate_up, w, fp8)


def linear(x, w, bias=None, fp8=None):
    """x (M, K), w (N, K), bias (N,) or None -> (M, N) of x.dtype. fp8=None: FP8 if w keeps codes only.

    In the sampler x may be row-wise (codes, scales) already; then the result is BF16.
    """
    if isinstance(x, tuple):
        return forward_product(x, w, bias, True, torch.bfloat16)
    return LinearFunction.apply(x, w, bias, w.data is None if fp8 is None else fp8)


# ------------------------------------------------------------------------------------------------------------
# Optimizer


def philox_reference(seed, c0, c1, c2, c3):
    """The four words of Philox 4x32-10 (Salmon et al. 2011), as by tl.philox: 32-bit words held in int64."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps: the 64 bits are right
        c0, c1, c2, c3 = (b >> 32) & low ^ c1 ^ k0, b & low, (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def round_reference(x, noise):
    """FP32 -> BF16, up or down with the probabilities that make the mean x; 16 bits of `noise` decide."""
    moved = (x.view(torch.int32) + (noise & 0xFFFF).to(torch.int32)) & -0x10000
    return torch.where(x.isnan(), x, moved.view(torch.float32)).bfloat16()


def adamw_reference(p, m, v, g, clip, finite, rate, rescale, betas, eps, decay, step, index):
    """In place: m, v, and p = p decay - rate m / (sqrt(v) rescale + eps); nothing at all unless `finite`.

    BF16 states are rounded with noise keyed by (step, index of the weight, row, column). Of 32 bits, 16 round
    the master and 16 both moments: nothing but their quotient sees that these two share.
    """
    if finite == 0:
        return
    g = g * clip
    m_new = m.float() * betas[0] + g * (1 - betas[0])
    v_new = v.float() * betas[1] + g * g * (1 - betas[1])
    p_new = p.float() * decay - rate * m_new / (sqrt_reference(v_new) * rescale + eps)
    if p.dtype == torch.bfloat16:
        K = p.shape[-1]
        row, quad = (torch.arange(n, device=p.device) for n in (p.numel() // K, cdiv(K, 4)))
        words = torch.stack(philox_reference(step, row[:, None], quad, index, 0), -1)
        noise = words.flatten(1)[:, :K].view(p.shape)
        p_new = round_reference(p_new, noise)
        m_new, v_new = round_reference(m_new, noise >> 16), round_reference(v_new, noise >> 16)
    for old, new in ((p, p_new), (m, m_new), (v, v_new)):
        old.copy_(new)


@jit
def round_bf16(x, noise):
    """round_reference; the result is still FP32, of a value that BF16 holds."""
    moved = (x.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)) & -0x10000
    return tl.where(x == x, moved.to(tl.float32, bitcast=True), x)  # a NaN could carry over into the sign


@jit(do_not_specialize=["index"])
def adamw_kernel(p, m, v, g, control, step, data, codes, scales, beta1, beta2, rest1, rest2, eps, decay,
                 index, N: tl.constexpr, K: tl.constexpr, CODES_LINE: tl.constexpr, ROWS: tl.constexpr):
    """One program updates a 128x128 tile of master p and moments m, v, and writes it to `data` and `codes`.

    The tile goes by in chunks of ROWS rows, to fit the registers. Its codes need the amax of all of it, so p
    is read a second time, from the cache. rest1 and rest2 are 1 - beta1 and 1 - beta2, from FP64.
    """
    clip, rate, rescale = tl.load(control), tl.load(control + 2), tl.load(control + 3)
    if tl.load(control + 1) == 0:  # a gradient was not finite: skip the update, moments included
        return
    tile = tl.program_id(0)
    first, k0 = tile // tl.cdiv(K, 128) * 128, tile % tl.cdiv(K, 128) * 128
    k = k0 + tl.arange(0, 128)
    peak = tl.zeros((ROWS, 128), tl.int32)
    for row in range(first, first + 128, ROWS):
        n = row + tl.arange(0, ROWS)[:, None]
        at, mask = n.to(tl.int64) * K + k, (n < N) & (k < K)
        grad = tl.load(g + at, mask=mask, other=0) * clip
        m_new = tl.load(m + at, mask=mask, other=0).to(tl.float32) * beta1 + grad * rest1
        v_new = tl.load(v + at, mask=mask, other=0).to(tl.float32) * beta2 + grad * grad * rest2
        change = tl.div_rn(rate * m_new, tl.sqrt_rn(v_new) * rescale + eps)
        value = tl.load(p + at, mask=mask, other=0).to(tl.float32) * decay - change
        if p.dtype.element_ty == tl.bfloat16:
            quad = k0 // 4 + tl.arange(0, 32)[None, :]  # one draw serves four neighbours
            a, b, c, d = tl.philox(tl.load(step), n.to(tl.uint32), quad.to(tl.uint32), index, 0)
            noise = tl.join(tl.join(a, c), tl.join(b, d)).reshape(ROWS, 128)
            value = round_bf16(value, noise)
            m_new, v_new = round_bf16(m_new, noise >> 16), round_bf16(v_new, noise >> 16)
        tl.store(m + at, m_new.to(m.dtype.element_ty), mask=mask)
        tl.store(v + at, v_new.to(v.dtype.element_ty), mask=mask)
        tl.store(p + at, value.to(p.dtype.element_ty), mask=mask)
        if data is not None:
            rounded = value.to(data.dtype.element_ty)
            tl.store(data + at, rounded, mask=mask)
            value = rounded.to(tl.float32)  # with both kept, the codes are those of the rounded data
        peak = tl.maximum(peak, tl.where(mask, magnitude(value), 0))
    if codes is not None:
        scale = scale_of(tl.max(tl.max(peak, 1), 0))
        tl.store(scales + tile, scale)
        tl.debug_barrier()  # what another thread of this program wrote is read below
        # In chunks of another shape than above: tiles of one shape share one layout, and what suits a store
        # of a byte an element does not suit FP32.
        for row in range(first, first + 128, 32):
            n = row + tl.arange(0, 32)[:, None]
            at, mask = n.to(tl.int64) * K + k, (n < N) & (k < K)
            value = tl.load((p if data is None else data) + at, mask=mask, other=0).to(tl.float32)
            tl.store(codes + n.to(tl.int64) * CODES_LINE + k, codes_of(value, scale), mask=mask)


class AdamW:
    """AdamW, which writes the weights of the forward pass in the same pass over masters and moments.

    A master starts as what its weight holds, for codes already rounded: call load() with the full-precision
    values. Gradients are FP32 views of one buffer: one call measures them all, one clears them. Clip factor,
    step count and the non-finite flag stay on the device, so the host never waits.

    Masters and moments are FP32 (12 bytes a parameter) or BF16 (6 bytes). A step changes most values by less
    than half a BF16 step, and rounding to nearest would undo it, for ever; stochastic rounding keeps it on
    average. Its noise depends on step, weight and element alone: a resumed run, or another rank, draws it.
    """

    def __init__(self, weights, betas, eps, weight_decay, decay, states=torch.float32):
        """weights: name -> Weight, each once. decay(name): whether weight_decay applies to it. states: dtype
        of masters and moments, torch.float32 or torch.bfloat16."""
        self.weights, self.betas, self.eps = weights, betas, eps
        self.decay = {name: weight_decay if decay(name) else 0.0 for name in weights}
        sizes = [round_up(w.shape.numel(), 4) for w in weights.values()]  # every view starts on 16 bytes
        device = next(buffer.device for w in weights.values() for buffer in w.buffers())
        self.grads = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.master, self.m, self.v = {}, {}, {}
        for (name, w), part in zip(weights.items(), self.grads.split(sizes)):
            w.grad = part[:w.shape.numel()].view(w.shape)
            # Where the forward pass reads the data type of the masters, its buffer is the master.
            same = w.data is not None and w.data.dtype == states
            self.master[name] = w.data if same else w.full().to(states)
            self.m[name], self.v[name] = (torch.zeros_like(w.grad, dtype=states) for _ in range(2))
        self.steps = torch.zeros((), dtype=torch.int64, device=device)

    def load(self, pairs):
        """Masters, and from them the weights, take their first values from (name, tensor) pairs."""
        missing = set(self.weights)
        for name, full in pairs:
            if name in self.weights:
                self.master[name].copy_(full)
                self.weights[name].write(self.master[name])
                missing.discard(name)
        if missing:
            raise ValueError(f"AdamW.load: no tensor for {sorted(missing)[:4]}; every weight needs one")

    @torch.no_grad()
    def step(self, lr, max_norm):
        """Update with the accumulated gradients, clipped to global norm `max_norm`, then clear them. One that
        is not finite skips the whole update. -> (grad_norm, finite), tensors on the device."""
        norm = torch.linalg.vector_norm(self.grads)  # no atomics: its order depends on the size alone
        finite = torch.isfinite(norm)
        self.steps += finite
        t = self.steps.double()
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # Bias correction in FP64: 1 - beta2^t loses half its digits in FP32 while t is small.
        rate, rescale = lr / (1 - self.betas[0] ** t), (1 - self.betas[1] ** t) ** -0.5
        control = torch.stack([clip.double(), finite.double(), rate, rescale]).float()
        for index, (name, w) in enumerate(self.weights.items()):
            self.update(index, name, w, control, 1 - lr * self.decay[name])
        self.grads.zero_()
        return norm, finite

    def update(self, index, name, w, control, decay):
        p = self.master[name]
        tensors = p, self.m[name], self.v[name], w.grad
        if not use_kernels(w.grad):
            adamw_reference(*tensors, *control, self.betas, self.eps, decay, self.steps, index)
            return w.write(p)
        N, K = w.shape if len(w.shape) == 2 else (1, w.shape.numel())  # a vector is a matrix of one row
        beta1, beta2 = self.betas
        launch(adamw_kernel, cdiv(N, BLOCK) * cdiv(K, BLOCK), *tensors, control, self.steps,
               None if w.data is p else w.data, w.codes, w.scales, beta1, beta2, 1 - beta1, 1 - beta2,
               self.eps, decay, index, N, K, round_up(K, 16), 4 * p.element_size(), num_warps=8)

    def state(self):
        """Tensors for a checkpoint: master.NAME, m.NAME, v.NAME, step."""
        parts = {"master": self.master, "m": self.m, "v": self.v}
        state = {f"{part}.{name}": x for part, group in parts.items() for name, x in group.items()}
        return state | {"step": self.steps}

    def load_state(self, state):
        """Resume from state(). Weights, written from the masters, get the bits they had, unless these were
        FP32 and become BF16."""
        mine = self.state()
        shape = lambda group, key: tuple(group[key].shape) if key in group else "absent"
        for key in sorted(mine.keys() | state.keys()):
            if shape(mine, key) != shape(state, key):
                raise ValueError(f"optimizer state: {key} is {shape(state, key)} in what was saved, "
                                 f"{shape(mine, key)} in this model: resume with the model that saved it")
        for key, tensor in mine.items():
            tensor.copy_(state[key])
        for name, w in self.weights.items():
            w.write(self.master[name])
