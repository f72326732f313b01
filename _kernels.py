"""The kernels that only the model uses: RoPE and q/k norm, attention (packed and paged), the head, the embedding.

Each topic has the same blocks in the same order: the torch reference (the specification; it runs without a GPU), the
Triton kernel, the wrapper, the autograd function. What they share is one promise: a value that leads to a log-probability
depends on the tokens of its own sequence alone, never on the batch, its order, padding, or on who asked for it (trainer,
prefill, decode). Hence no split sums, no atomics, one KV tile, softmax rows that lie within one warp, and contraction
switched off with `tl.fma` wherever a fused product is meant.

Shapes: T packed tokens, B sequences or slots, C hidden, H query heads, G key/value heads, D head size, V vocabulary.
"""
import math

import torch
import torch.nn.functional as F

from fp8 import jit, matmul_rows, tl, triton, use_kernels

PAGE = 64                    # keys of one attention step == page of the cache: training, prefill and decode share it
VTILE = 128                  # vocabulary columns of one (max, sum) partial in the head
LOG2E = 1.4426950408889634   # the GPU has exp2 only: log2(e) is folded into the softmax scale


# ------------------------------------------------------------------------------------------------------------------
# Packing: sequences laid end to end, and the tiles that attention walks

class Packing:
    """Where B sequences lie in T packed tokens. Made by `pack`; every tensor is int32 on the model's device.

    positions (T,) in the token's own sequence; starts (B+1,) row offsets; tiles (N, 4): one row for each attention tile
    of `rows` queries, (first packed row of the sequence, first query in the sequence, length, 0).
    """

    def __init__(self, lengths, device):
        # 128 rows fill a Hopper tile (8 warps). The CPU computes whole padded tiles, decode included: 16 waste less.
        self.rows = 128 if device.type == "cuda" else 16
        starts = F.pad(lengths.cumsum(0), (1, 0))
        self.total, self.lengths = int(starts[-1]), lengths.tolist()
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        positions = torch.arange(self.total) - starts[sequence]
        count = (lengths + self.rows - 1) // self.rows
        owner = torch.arange(len(lengths)).repeat_interleave(count)
        first = (torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]) * self.rows
        tiles = torch.stack([starts[owner], first, lengths[owner], torch.zeros_like(owner)], dim=1)
        # Causal work grows with `first`: the longest tiles start first, so that the last ones to finish are short.
        tiles = tiles[first.argsort(descending=True, stable=True)]
        on_device = lambda x: x.to(torch.int32).to(device)
        self.positions, self.starts, self.tiles = on_device(positions), on_device(starts), on_device(tiles)


def pack(seqlens, device):
    """Lengths (a list, or an int64 tensor on the CPU; zeros allowed) -> Packing on `device`."""
    lengths = torch.as_tensor(seqlens, dtype=torch.int64)
    if lengths.ndim != 1 or lengths.is_cuda or (len(lengths) and int(lengths.min()) < 0):
        raise ValueError(f"pack: seqlens must be a flat list of lengths >= 0, held on the CPU; got {seqlens!r}")
    return Packing(lengths, torch.device(device))


# ------------------------------------------------------------------------------------------------------------------
# Norm of q and k, RoPE, and the split of the fused QKV rows

def rope_table(config, length, device):
    """FP32 (length, D): cosines of the D/2 angles, then their sines, by position in the token's own sequence.

    Computed on the CPU whatever the device, so that every machine rotates by the same bits.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.inv_freq().float().cpu())
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def qk_norm_rope_ref(qkv, q_weight, k_weight, eps, table, positions, H, G):
    """Reference. q and k heads: RMS norm (rounded to qkv.dtype), rotation (rounded again). v heads: copied."""
    T, D = len(qkv), qkv.shape[1] // (H + 2 * G)
    cos, sin = table[positions.long()].view(T, 1, D).chunk(2, dim=2)
    out = []
    for x, weight in zip(qkv.view(T, -1, D).split([H, G, G], dim=1)[:2], (q_weight, k_weight)):
        x = x.float()
        if weight is not None:
            rstd = 1 / (x.square().sum(-1, keepdim=True) / D + eps).sqrt()
            x = (x * rstd * weight.float()).to(qkv.dtype).float()
        a, b = x.chunk(2, dim=2)
        out.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2).to(qkv.dtype))
    return *out, qkv.view(T, -1, D)[:, H + G:].contiguous()


def qk_norm_rope_backward_ref(dq, dk, dv, qkv, q_weight, k_weight, eps, table, positions):
    """Reference. Gradients of q, k, v -> d(qkv), and the FP32 (D,) gradients of the two norm weights (or None)."""
    (T, H, D), G = dq.shape, dk.shape[1]
    cos, sin = table[positions.long()].view(T, 1, D).chunk(2, dim=2)
    grads, weight_grads = [], []
    for g, x, weight in zip((dq, dk), qkv.view(T, -1, D).split([H, G, G], dim=1)[:2], (q_weight, k_weight)):
        a, b = g.float().chunk(2, dim=2)
        g = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=2)      # a rotation's transpose turns it back
        if weight is not None:
            rstd = 1 / (x.float().square().sum(-1, keepdim=True) / D + eps).sqrt()
            x_hat = x.float() * rstd
            weight_grads.append((g * x_hat).sum((0, 1)))
            g = g * weight.float()
            g = rstd * (g - x_hat * ((g * x_hat).sum(-1, keepdim=True) / D))
        else:
            weight_grads.append(None)
        grads.append(g.to(qkv.dtype))
    return torch.cat(grads + [dv], dim=1).view(T, -1), *weight_grads


@jit
def _rotate_load(at, weight_ptr, other_ptr, eps, mask, is_q, D: tl.constexpr, NORM: tl.constexpr):
    """One (heads, D/2) pair of halves at `at` in FP32, their norm weights, and 1/RMS by head."""
    i = tl.arange(0, D // 2)[None, :]
    lo = tl.load(at + i, mask=mask, other=0).to(tl.float32)
    hi = tl.load(at + D // 2 + i, mask=mask, other=0).to(tl.float32)
    w_lo, w_hi, rstd = lo, hi, lo
    if NORM:
        w_lo = tl.where(is_q, tl.load(weight_ptr + i), tl.load(other_ptr + i)).to(tl.float32)
        w_hi = tl.where(is_q, tl.load(weight_ptr + D // 2 + i), tl.load(other_ptr + D // 2 + i)).to(tl.float32)
        square = tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(square / D + eps))[:, None]
    return lo, hi, w_lo, w_hi, rstd


@jit
def _qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, table_ptr, position_ptr, q_ptr, k_ptr, v_ptr,      # pointers
    eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):
    """One program: one token, all of its heads as a (HEADS, D/2) tile of low halves and one of high halves.

    Widths are constants, so that the order of the sum of squares can depend on nothing else.
    """
    t = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, D // 2)[None, :]
    used, is_q, turned = head < H + 2 * G, head < H, head < H + G
    lo, hi, w_lo, w_hi, rstd = _rotate_load(qkv_ptr + t * (H + 2 * G) * D + head * D, q_weight_ptr, k_weight_ptr, eps,
                                            used, is_q, D, NORM)
    a, b = lo, hi
    if NORM:
        a = (a * rstd * w_lo).to(q_ptr.dtype.element_ty).to(tl.float32)
        b = (b * rstd * w_hi).to(q_ptr.dtype.element_ty).to(tl.float32)
    position = tl.load(position_ptr + t).to(tl.int64)
    cos = tl.load(table_ptr + position * D + i)
    sin = tl.load(table_ptr + position * D + D // 2 + i)
    lo = tl.where(turned, a * cos - b * sin, lo).to(q_ptr.dtype.element_ty)
    hi = tl.where(turned, b * cos + a * sin, hi).to(q_ptr.dtype.element_ty)
    q_at = q_ptr + t * H * D + head * D + i
    k_at = k_ptr + t * G * D + (head - H) * D + i
    v_at = v_ptr + t * G * D + (head - H - G) * D + i
    tl.store(q_at, lo, mask=is_q)
    tl.store(q_at + D // 2, hi, mask=is_q)
    tl.store(k_at, lo, mask=turned & (head >= H))
    tl.store(k_at + D // 2, hi, mask=turned & (head >= H))
    tl.store(v_at, lo, mask=used & (head >= H + G))
    tl.store(v_at + D // 2, hi, mask=used & (head >= H + G))


@jit(do_not_specialize=["T"])
def _qk_norm_rope_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, table_ptr, position_ptr,   # pointers, read
    dqkv_ptr, partial_ptr,                                                                  # pointers, written
    T, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr,
):
    """One program: TOKENS tokens one after the other. partial (programs, 2, D): its sums for the two norm weights."""
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, D // 2)[None, :]
    used, is_q, turned = head < H + 2 * G, head < H, head < H + G
    sum_lo, sum_hi = tl.zeros((HEADS, D // 2), tl.float32), tl.zeros((HEADS, D // 2), tl.float32)
    first = tl.program_id(0) * TOKENS
    for token in range(first, tl.minimum(first + TOKENS, T)):
        t = token.to(tl.int64)
        at = dq_ptr + t * H * D + head * D + i
        a = tl.load(at, mask=is_q, other=0).to(tl.float32)
        b = tl.load(at + D // 2, mask=is_q, other=0).to(tl.float32)
        at = dk_ptr + t * G * D + (head - H) * D + i                      # each head lies in one of the three: add
        a += tl.load(at, mask=turned & (head >= H), other=0).to(tl.float32)
        b += tl.load(at + D // 2, mask=turned & (head >= H), other=0).to(tl.float32)
        at = dv_ptr + t * G * D + (head - H - G) * D + i
        a += tl.load(at, mask=used & (head >= H + G), other=0).to(tl.float32)
        b += tl.load(at + D // 2, mask=used & (head >= H + G), other=0).to(tl.float32)
        position = tl.load(position_ptr + t).to(tl.int64)
        cos = tl.load(table_ptr + position * D + i)
        sin = tl.load(table_ptr + position * D + D // 2 + i)
        g_lo, g_hi = tl.where(turned, a * cos + b * sin, a), tl.where(turned, b * cos - a * sin, b)
        if NORM:
            lo, hi, w_lo, w_hi, rstd = _rotate_load(qkv_ptr + t * (H + 2 * G) * D + head * D, q_weight_ptr,
                                                    k_weight_ptr, eps, used, is_q, D, NORM)
            lo, hi = lo * rstd, hi * rstd
            sum_lo += g_lo * lo
            sum_hi += g_hi * hi
            w_lo, w_hi = g_lo * w_lo, g_hi * w_hi
            mean = ((tl.sum(w_lo * lo, 1) + tl.sum(w_hi * hi, 1)) / D)[:, None]
            g_lo = tl.where(turned, rstd * (w_lo - lo * mean), g_lo)
            g_hi = tl.where(turned, rstd * (w_hi - hi * mean), g_hi)
        at = dqkv_ptr + t * (H + 2 * G) * D + head * D + i
        tl.store(at, g_lo.to(dqkv_ptr.dtype.element_ty), mask=used)
        tl.store(at + D // 2, g_hi.to(dqkv_ptr.dtype.element_ty), mask=used)
    if NORM:
        at = partial_ptr + tl.program_id(0) * 2 * D + tl.arange(0, D // 2)
        is_k = turned & (head >= H)
        tl.store(at, tl.sum(tl.where(is_q, sum_lo, 0), 0))
        tl.store(at + D // 2, tl.sum(tl.where(is_q, sum_hi, 0), 0))
        tl.store(at + D, tl.sum(tl.where(is_k, sum_lo, 0), 0))
        tl.store(at + D + D // 2, tl.sum(tl.where(is_k, sum_hi, 0), 0))


def _head_tile(H, G, D):
    """(heads padded to a power of two, warps of the kernels above): functions of the widths alone."""
    heads = triton.next_power_of_2(H + 2 * G)
    return heads, min(8, max(1, heads * D // 1024))


def _qk_norm_rope_gpu(qkv, q_weight, k_weight, eps, table, positions, H, G):
    T, D = len(qkv), qkv.shape[1] // (H + 2 * G)
    _check_head_size(D)
    q, k, v = (qkv.new_empty(T, heads, D) for heads in (H, G, G))
    heads, warps = _head_tile(H, G, D)
    if T:
        _qk_norm_rope_kernel[(T,)](
            qkv.contiguous(), q_weight, k_weight, table, positions, q, k, v, eps, H, G, D, heads,
            q_weight is not None, num_warps=warps, enable_fp_fusion=False)
    return q, k, v


def _qk_norm_rope_backward_gpu(dq, dk, dv, qkv, q_weight, k_weight, eps, table, positions):
    (T, H, D), G, tokens = dq.shape, dk.shape[1], 8
    norm, programs = q_weight is not None, triton.cdiv(T, tokens)
    dqkv, partial = torch.empty_like(qkv), torch.empty(programs, 2, D, device=qkv.device)
    heads, warps = _head_tile(H, G, D)
    if T:
        _qk_norm_rope_backward_kernel[(programs,)](
            dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv.contiguous(), q_weight, k_weight, table, positions,
            dqkv, partial, T, eps, H, G, D, heads, norm, tokens, num_warps=warps, enable_fp_fusion=False)
    return dqkv, *(partial.sum(0) if norm else (None, None))


class _QKNormRope(torch.autograd.Function):

    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, eps, table, positions, H, G):
        weights = [w if w is None else w.data for w in (q_norm, k_norm)]
        forward = _qk_norm_rope_gpu if use_kernels(qkv) else qk_norm_rope_ref
        ctx.save_for_backward(qkv, table, positions)
        ctx.weights = q_norm, k_norm, eps
        return forward(qkv, *weights, eps, table, positions, H, G)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        (qkv, table, positions), (q_norm, k_norm, eps) = ctx.saved_tensors, ctx.weights
        weights = [w if w is None else w.data for w in (q_norm, k_norm)]
        backward = _qk_norm_rope_backward_gpu if use_kernels(qkv) else qk_norm_rope_backward_ref
        dqkv, *weight_grads = backward(dq, dk, dv, qkv, *weights, eps, table, positions)
        for weight, grad in zip((q_norm, k_norm), weight_grads):
            if weight is not None:
                weight.add_grad(grad)
        return dqkv, *[None] * 7


def qk_norm_rope(qkv, q_norm, k_norm, eps, table, positions, H, G):
    """qkv (T, (H+2G)*D) -> q (T,H,D), k (T,G,D), v (T,G,D), contiguous, in qkv.dtype.

    q_norm, k_norm: Weight (D,) or None (families without q/k norm); table: `rope_table`; positions (T,) int32.
    """
    return _QKNormRope.apply(qkv, q_norm, k_norm, eps, table, positions, H, G)


# ------------------------------------------------------------------------------------------------------------------
# Attention

def _attend_tiles(q, positions, k_pages, v_pages, page_table, lengths):
    """The one tile that both references run: query tiles over pages, with an online softmax.

    q (N,H,R,D), row r of tile n at positions[n, r]; keys and values of tile n: page_table[n] in (P,G,PAGE,D), of which
    lengths[n] are valid. Every product has the same shape whatever N is, and a step that is masked for a row leaves
    it as it was (factor exp(0) = 1, terms 0): so a row's bits depend on its own keys only. -> (N,H,R,D) FP32.
    """
    (N, H, R, D), G, dtype = q.shape, k_pages.shape[1], q.dtype
    S = H // G * R                                                        # rows of a product: a group's heads, stacked
    top = torch.full((N, G, S, 1), -torch.inf)
    total, out = torch.zeros(N, G, S, 1), torch.zeros(N, G, S, D)
    q, last = q.float().reshape(N, G, S, D).contiguous(), torch.minimum(positions.amax(1), lengths - 1)
    positions = positions.repeat(1, H // G)[:, None, :, None]             # (N, 1, S, 1)
    for j in range(int(last.max()) // PAGE + 1 if N else 0):
        n = (last // PAGE >= j).nonzero()[:, 0]                           # tiles that still have keys
        key = torch.arange(j * PAGE, (j + 1) * PAGE)
        valid = (key < lengths[n, None])[:, None]                         # (n, 1, PAGE)
        # Unused places of a page hold anything, NaN included, and 0 * NaN would reach the sum: load zeros.
        k, v = (torch.where(valid[..., None], pages[page_table[n, j].long()], 0).float().view(-1, PAGE, D)
                for pages in (k_pages, v_pages))
        scores = torch.bmm(q[n].view(-1, S, D), k.mT).view(-1, G, S, PAGE) * D ** -0.5
        scores = scores.masked_fill_(~((key <= positions[n]) & valid[:, :, None]), -torch.inf)
        new_top = torch.maximum(top[n], scores.amax(-1, keepdim=True))
        p, fade = (scores - new_top).exp_(), (top[n] - new_top).exp()
        total[n] = total[n] * fade + p.sum(-1, keepdim=True)
        product = torch.bmm(p.to(dtype).float().view(-1, S, PAGE), v).view(-1, G, S, D)
        out[n], top[n] = out[n] * fade + product, new_top
    return (out / total.clamp(min=1e-30)).view(N, H, R, D)                # length 0: no key, zeros


def attention_ref(q, k, v, packing):
    """Reference: the packed tokens become zero-padded query tiles and pages, then tiles back to tokens."""
    (T, H, D), R = q.shape, packing.rows
    start, first, length, _ = packing.tiles.long().unbind(1)
    positions = first[:, None] + torch.arange(R)                          # (N, R)
    inside = positions < length[:, None]
    row = (start[:, None] + positions)[inside]                            # packed row of each used place of a tile
    tiles = q.new_zeros(len(start), R, H, D)
    tiles[inside] = q[row]
    pages_of = torch.tensor([-(-n // PAGE) for n in packing.lengths], dtype=torch.int64)
    first_page = pages_of.cumsum(0) - pages_of
    owner = torch.arange(len(pages_of)).repeat_interleave(torch.tensor(packing.lengths, dtype=torch.int64))
    position = packing.positions.long()
    k_pages, v_pages = (x.new_zeros(int(pages_of.sum()), k.shape[1], PAGE, D) for x in (k, v))
    write_pages_ref(k, v, k_pages, v_pages, first_page[owner] * PAGE + position)
    sequence = torch.searchsorted(packing.starts.long(), start.contiguous(), right=True) - 1
    table = first_page[sequence, None] + torch.arange(max(pages_of.tolist(), default=0))
    out = _attend_tiles(tiles.transpose(1, 2), positions, k_pages, v_pages, table, length).transpose(1, 2)
    o = torch.empty_like(q)
    o[row] = out[inside].to(q.dtype)
    return o


def paged_attention_ref(q, k_pages, v_pages, page_table, lengths):
    """Reference: one query a sequence, put where the packed pass has it in its tile, over that sequence's pages."""
    (B, H, D), R = q.shape, 16
    lengths = lengths.long()
    place = (lengths - 1).clamp(min=0) % R
    tiles = q.new_zeros(B, R, H, D)
    tiles[torch.arange(B), place] = q
    positions = ((lengths - 1).clamp(min=0) - place)[:, None] + torch.arange(R)
    out = _attend_tiles(tiles.transpose(1, 2), positions, k_pages, v_pages, page_table, lengths)
    return out[torch.arange(B), :, place].to(q.dtype)


def attention_backward_ref(do, q, k, v, packing):
    """Reference. The textbook formulas, sequence by sequence, in FP32; gradients need no equality of bits."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    repeat, scale, start = q.shape[1] // k.shape[1], q.shape[2] ** -0.5, 0
    for length in packing.lengths:
        rows = slice(start, start + length)
        qs, ks, vs, dos = (x[rows].float().transpose(0, 1) for x in (q, k, v, do))     # (heads, length, D)
        ks, vs = ks.repeat_interleave(repeat, 0), vs.repeat_interleave(repeat, 0)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        p = (qs @ ks.mT * scale).masked_fill(future, -torch.inf).softmax(-1)
        dp = dos @ vs.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq[rows] = (ds @ ks).transpose(0, 1).to(q.dtype)
        for out, g in ((dk, ds.mT @ qs), (dv, p.mT @ dos)):
            out[rows] = g.unflatten(0, (-1, repeat)).sum(1).transpose(0, 1).to(q.dtype)   # a group shares its keys
        start += length
    return dq, dk, dv


@jit
def _softmax_step(scores, seen, v, top, total, acc, SCALE: tl.constexpr):
    """One page of keys: scores (rows, PAGE) FP32, unscaled. The trainer's tile and the decode tile both call this.

    In units of log2: top is the running maximum, total the sum of 2^(score - top), acc (rows, D) that sum times v.
    """
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
    p = tl.exp2(tl.fma(scores, SCALE, -new_top[:, None]))
    fade = tl.exp2(top - new_top)                 # exactly 1 where the page changed nothing, 0 at the first page
    total = tl.fma(total, fade, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return new_top, total, acc


@jit(do_not_specialize=["T"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, tile_ptr, o_ptr, lse_ptr,          # pointers
    T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):
    """One program: ROWS queries of one sequence and head. lse (H,T) = log2 of the softmax denominator, for backward.

    Heads are fastest in the grid: those that share keys run side by side and find them in the L2 cache.
    """
    tile, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(tile_ptr + tile * 4).to(tl.int64)
    first, length = tl.load(tile_ptr + tile * 4 + 1), tl.load(tile_ptr + tile * 4 + 2)
    row, col, d = first + tl.arange(0, ROWS), tl.arange(0, PAGE), tl.arange(0, D)[None, :]
    inside = row < length
    # A 64-bit base and 32-bit places in the tile: a table of 64-bit pointers would cost the registers.
    at = start * (H * D) + first * (H * D) + h * D
    place = tl.arange(0, ROWS)[:, None] * (H * D) + d
    kv_at, kv_place = start * (G * D) + (h // (H // G)) * D, col[:, None] * (G * D) + d
    q = tl.load(q_ptr + at + place, mask=inside[:, None], other=0)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for begin in range(0, tl.minimum(first + ROWS, length), PAGE):
        key = begin + col
        valid = key < length
        k = tl.load(k_ptr + kv_at + kv_place, mask=valid[:, None], other=0)
        v = tl.load(v_ptr + kv_at + kv_place, mask=valid[:, None], other=0)
        kv_at += PAGE * G * D
        # Masked even where all keys are seen: one code for all pages, so one order for all rows.
        seen = (key[None, :] <= row[:, None]) & valid[None, :]
        top, total, acc = _softmax_step(tl.dot(q, tl.trans(k)), seen, v, top, total, acc, SCALE)
    acc = acc * tl.div_rn(1.0, total)[:, None]
    tl.store(o_ptr + at + place, acc.to(o_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + h.to(tl.int64) * T + start + row, top + tl.log2(total), mask=inside)


@jit(do_not_specialize=["max_pages"])
def _paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, o_ptr,      # pointers
    max_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
):
    """One program: the newest query of one sequence, all heads of one group, padded to 16 rows in one warp.

    One warp because a softmax row must be summed within a warp, as in the trainer's tile: 16 rows over 2 or 4 warps
    give other bits (1 ulp). The number of pages comes from the device: a CUDA graph serves every length.
    """
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(length_ptr + b)
    i, col, d = tl.arange(0, 16), tl.arange(0, PAGE), tl.arange(0, D)[None, :]
    used = (i < H // G)[:, None]
    at = b * H * D + (g * (H // G) + i)[:, None] * D + d
    place = col[:, None] * D + d
    q = tl.load(q_ptr + at, mask=used, other=0)
    top, total = tl.full((16,), float("-inf"), tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for begin in range(0, length, PAGE):
        page = tl.load(table_ptr + b * max_pages + begin // PAGE).to(tl.int64)
        valid = begin + col < length
        at_page = (page * G + g) * (PAGE * D)
        k = tl.load(k_ptr + at_page + place, mask=valid[:, None], other=0)     # unused places hold anything, even NaN
        v = tl.load(v_ptr + at_page + place, mask=valid[:, None], other=0)
        top, total, acc = _softmax_step(tl.dot(q, tl.trans(k)), valid[None, :], v, top, total, acc, SCALE)
    total = tl.where(length > 0, total, 1.0)                              # an idle slot: zeros, not 0/0
    acc = acc * tl.div_rn(1.0, total)[:, None]
    tl.store(o_ptr + at, acc.to(o_ptr.dtype.element_ty), mask=used)


def _check_head_size(D):
    if D not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim {D}: the GPU kernels take 16, 32, 64, 128 or 256; other sizes run on the CPU only")


def _check_bf16(x, what):
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{what} is {x.dtype}: the GPU kernels take torch.bfloat16; other types run on the CPU only")


def _attention_gpu(q, k, v, packing):
    """-> o (T,H,D), lse (H,T). Measured to give equal bits: 128 rows x 8 warps, 64 x 4, and 16 x 1 (decode)."""
    (T, H, D), G, rows = q.shape, k.shape[1], packing.rows
    _check_head_size(D), _check_bf16(q, "attention's q")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = torch.empty_like(q), torch.empty(H, T, device=q.device)
    _attention_kernel[(len(packing.tiles) * H,)](
        q, k, v, packing.tiles, o, lse, T, H, G, D, D ** -0.5 * LOG2E, PAGE, rows,
        num_warps=rows // 16, num_stages=2 if D > 128 else 3, enable_fp_fusion=False)
    return o, lse


def _paged_attention_gpu(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), G = q.shape, k_pages.shape[1]
    _check_head_size(D), _check_bf16(q, "paged_attention's q")
    if H // G > 16:
        raise ValueError(f"{H} query heads over {G} key heads: a decode tile holds at most 16 query heads a group")
    o = torch.empty_like(q)
    if B:
        _paged_attention_kernel[(G, B)](
            q.contiguous(), k_pages, v_pages, page_table, lengths, o, page_table.stride(0), H, G, D,
            D ** -0.5 * LOG2E, PAGE, num_warps=1, num_stages=3, enable_fp_fusion=False)
    return o


@jit(do_not_specialize=["T"])
def _attention_delta_kernel(do_ptr, o_ptr, delta_ptr, T, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """delta (H,T) = sum over D of do * o: what the softmax's gradient subtracts. One program: ROWS tokens of a head."""
    t, h = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    at, mask = t[:, None] * (H * D) + h * D + tl.arange(0, D)[None, :], (t < T)[:, None]
    product = tl.load(do_ptr + at, mask=mask, other=0).to(tl.float32) * tl.load(o_ptr + at, mask=mask, other=0)
    tl.store(delta_ptr + h.to(tl.int64) * T + t, tl.sum(product, 1), mask=t < T)


@jit(do_not_specialize=["T"])
def _attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, tile_ptr, dk_ptr, dv_ptr,      # pointers
    T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, DK_SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
):
    """One program: KEYS keys of one group. It walks the group's heads and their queries, STEP at a time, in ascending
    order, and alone writes dk and dv: no atomics, one order. Everything is held transposed, (keys, queries)."""
    g, sub = tl.program_id(0) % G, tl.program_id(0) // G % (ROWS // KEYS)
    tile_at = tile_ptr + tl.program_id(0) // (G * (ROWS // KEYS)) * 4
    start = tl.load(tile_at).to(tl.int64)
    first, length = tl.load(tile_at + 1), tl.load(tile_at + 2)
    # Early keys are seen by the most queries: mirror the table, whose longest query tiles come first.
    first = tl.cdiv(length, ROWS) * ROWS - ROWS - first + sub * KEYS
    key, d = first + tl.arange(0, KEYS), tl.arange(0, D)[None, :]
    kv_at, valid = (start + key)[:, None] * (G * D) + g * D + d, (key < length)[:, None]
    place = tl.arange(0, STEP)[:, None] * (H * D) + d
    k = tl.load(k_ptr + kv_at, mask=valid, other=0)
    v = tl.load(v_ptr + kv_at, mask=valid, other=0)
    dk, dv = tl.zeros((KEYS, D), tl.float32), tl.zeros((KEYS, D), tl.float32)
    for i in range(H // G):
        h = g * (H // G) + i
        for begin in range(first // STEP * STEP, length, STEP):
            row = begin + tl.arange(0, STEP)
            inside = row < length
            at = (start + begin) * (H * D) + h * D
            q = tl.load(q_ptr + at + place, mask=inside[:, None], other=0)
            do = tl.load(do_ptr + at + place, mask=inside[:, None], other=0)
            lse = tl.load(lse_ptr + h.to(tl.int64) * T + start + row, mask=inside, other=float("inf"))
            delta = tl.load(delta_ptr + h.to(tl.int64) * T + start + row, mask=inside, other=0)
            p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q)), SCALE, -lse[None, :]))
            p = tl.where(key[:, None] <= row[None, :], p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv)
            ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + kv_at, (dk * DK_SCALE).to(dk_ptr.dtype.element_ty), mask=valid)
    tl.store(dv_ptr + kv_at, dv.to(dv_ptr.dtype.element_ty), mask=valid)


@jit(do_not_specialize=["T"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, tile_ptr, dq_ptr,              # pointers
    T,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, DQ_SCALE: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, STEP: tl.constexpr,
):
    """One program: QUERIES queries of one head, over their keys in ascending order: the forward pass's walk again."""
    h, sub = tl.program_id(0) % H, tl.program_id(0) // H % (ROWS // QUERIES)
    tile_at = tile_ptr + tl.program_id(0) // (H * (ROWS // QUERIES)) * 4
    start = tl.load(tile_at).to(tl.int64)
    first, length = tl.load(tile_at + 1) + sub * QUERIES, tl.load(tile_at + 2)
    row, d = first + tl.arange(0, QUERIES), tl.arange(0, D)[None, :]
    inside = row < length
    at = (start + row)[:, None] * (H * D) + h * D + d
    q = tl.load(q_ptr + at, mask=inside[:, None], other=0)
    do = tl.load(do_ptr + at, mask=inside[:, None], other=0)
    lse = tl.load(lse_ptr + h.to(tl.int64) * T + start + row, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + h.to(tl.int64) * T + start + row, mask=inside, other=0)
    dq, place = tl.zeros((QUERIES, D), tl.float32), tl.arange(0, STEP)[:, None] * (G * D) + d
    for begin in range(0, tl.minimum(first + QUERIES, length), STEP):
        key = begin + tl.arange(0, STEP)
        kv_at, valid = (start + begin) * (G * D) + (h // (H // G)) * D, (key < length)[:, None]
        k = tl.load(k_ptr + kv_at + place, mask=valid, other=0)
        v = tl.load(v_ptr + kv_at + place, mask=valid, other=0)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k)), SCALE, -lse[:, None]))
        p = tl.where(key[None, :] <= row[:, None], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dq_ptr + at, (dq * DQ_SCALE).to(dq_ptr.dtype.element_ty), mask=inside[:, None])


def _attention_backward_gpu(do, q, k, v, o, lse, packing):
    (T, H, D), G, rows, n = q.shape, k.shape[1], packing.rows, len(packing.tiles)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    delta = torch.empty_like(lse)
    _attention_delta_kernel[(triton.cdiv(T, 64), H)](do, o, delta, T, H, D, 64, num_warps=4, enable_fp_fusion=False)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    keys = min(rows, 64 if D > 128 else 128)              # two (keys, D) sums in registers: 256 x 128 would spill
    _attention_dkv_kernel[(n * (rows // keys) * G,)](
        q, k, v, do, lse, delta, packing.tiles, dk, dv, T, H, G, D, D ** -0.5 * LOG2E, D ** -0.5, rows, keys,
        min(rows, 64), num_warps=8 if rows > 64 else 1, num_stages=2, enable_fp_fusion=False)
    _attention_dq_kernel[(n * H,)](
        q, k, v, do, lse, delta, packing.tiles, dq, T, H, G, D, D ** -0.5 * LOG2E, D ** -0.5, rows, rows,
        64, num_warps=8 if rows > 64 else 1, num_stages=2, enable_fp_fusion=False)
    return dq, dk, dv


class _Attention(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, packing):
        ctx.packing = packing
        if use_kernels(q):
            o, lse = _attention_gpu(q, k, v, packing)
            ctx.save_for_backward(q, k, v, o, lse)
            return o
        ctx.save_for_backward(q, k, v)
        return attention_ref(q, k, v, packing)

    @staticmethod
    def backward(ctx, do):
        backward = _attention_backward_gpu if use_kernels(do) else attention_backward_ref
        return *backward(do.contiguous(), *ctx.saved_tensors, ctx.packing), None


def attention(q, k, v, packing):
    """Causal attention of packed sequences: q (T,H,D), k, v (T,G,D) -> (T,H,D); head h reads group h // (H/G)."""
    if len(q) != packing.total or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: {len(q)} tokens and {q.shape[1]} query heads do not fit lengths that sum to "
                         f"{packing.total} and {k.shape[1]} key heads")
    return _Attention.apply(q, k, v, packing) if len(q) else torch.empty_like(q)


def write_pages_ref(k, v, k_pages, v_pages, slots):
    """Reference. Token t goes to page slots[t] // PAGE, place slots[t] % PAGE."""
    k_pages[slots // PAGE, :, slots % PAGE] = k
    v_pages[slots // PAGE, :, slots % PAGE] = v


@jit
def _write_pages_kernel(
    k_ptr, v_ptr, k_page_ptr, v_page_ptr, slot_ptr,         # pointers
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):
    """One program: one token. Pages are (P, G, PAGE, D): the keys that a decode program reads lie side by side."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + t)
    g, d = tl.arange(0, HEADS)[:, None], tl.arange(0, D)[None, :]
    at, to = t * G * D + g * D + d, (slot // PAGE * G + g) * (PAGE * D) + slot % PAGE * D + d
    tl.store(k_page_ptr + to, tl.load(k_ptr + at, mask=g < G), mask=g < G)
    tl.store(v_page_ptr + to, tl.load(v_ptr + at, mask=g < G), mask=g < G)


def _write_pages_gpu(k, v, k_pages, v_pages, slots):
    T, G, D = k.shape
    if T:
        _write_pages_kernel[(T,)](k.contiguous(), v.contiguous(), k_pages, v_pages, slots, G,
                                  triton.next_power_of_2(G), D, PAGE, num_warps=4)


def write_pages(k, v, k_pages, v_pages, slots):
    """Copies k, v (T,G,D) into pages (P,G,PAGE,D) at slots (T,) int64: exact, so that decode reads the trainer's bits."""
    (_write_pages_gpu if use_kernels(k) else write_pages_ref)(k, v, k_pages, v_pages, slots)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    """One new token a sequence: q (B,H,D) over the pages page_table (B, max) int32 -> (B,H,D).

    lengths (B,) int32 count the new token, whose k and v are already in place; length 0 gives zeros. The bits equal
    the token's row in `attention`.
    """
    return (_paged_attention_gpu if use_kernels(q) else paged_attention_ref)(q, k_pages, v_pages, page_table, lengths)


# ------------------------------------------------------------------------------------------------------------------
# Head: log-probabilities of given tokens, and of sampled ones, by the same code

def _philox_ref(seed, c0, c1, c2, c3):
    """First word of Philox 4x32-10 (Salmon et al. 2011), as tl.philox: 32-bit words held in int64, seed 64 bits."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2                           # int64 wraps: the 64 bits are right
        c0, c1, c2, c3 = (b >> 32) & low ^ c1 ^ k0, b & low, (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def _gumbel_ref(bits):
    """Gumbel noise of 32 random bits. The maximum is decided where the exponential e is small, so the bits' fine end
    (steps of 2^-32 near 0) is put there; u stays inside (0,1), hence the noise inside (-3, 23)."""
    u = ((bits.float() + 0.5) * 2.0 ** -32).clamp(max=1 - 2.0 ** -24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))     # -log(1 - u) loses digits near u = 0
    return -torch.where(u < 1 / 64, series, -(1 - u).log()).log()


def head_ref(hidden, w, inv_temp, targets=None, noise=None, seed=None, keys=None, positions=None):
    """Reference. logits = (hidden w^T) * inv_temp in FP32, their softmax in tiles of VTILE columns merged in order.

    Scores `targets`, or, without them, the tokens that win logits + noise * gumbel (ties: the lowest id).
    -> (tokens (T,) int64, logprobs (T,) FP32, lse (T,) FP32)
    """
    V = len(w)
    x = matmul_rows(hidden.float(), w.float()) * inv_temp
    tiles = F.pad(x, (0, -V % VTILE), value=-torch.inf).view(len(x), -1, VTILE)
    tile_top = tiles.amax(-1)
    tile_sum = (tiles - tile_top[:, :, None]).exp().sum(-1)
    top = tile_top.amax(-1)
    log_sum = (tile_sum * (tile_top - top[:, None]).exp()).sum(-1).log()
    if targets is None:
        keys, positions = keys[:, None], positions[:, None].long()
        bits = _philox_ref(seed, torch.arange(V), positions, keys & 0xFFFFFFFF, (keys >> 32) & 0xFFFFFFFF)
        perturbed = x + noise * _gumbel_ref(bits)
        best = perturbed.amax(-1, keepdim=True)
        targets = torch.where(perturbed == best, torch.arange(V), V - 1).amin(-1)     # NaN: the last id, logprob NaN
    picked = x.gather(1, targets[:, None])[:, 0]
    return targets, picked - top - log_sum, top + log_sum


@jit
def _gumbel(bits):
    """Gumbel noise of 32 random bits; the torch reference above says why this form."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    e = tl.where(u < 1 / 64, series, -0.6931471805599453 * tl.log2(1 - u))     # log2 is one instruction, log thirty
    return -0.6931471805599453 * tl.log2(e)


@jit(do_not_specialize=["T"])
def _head_kernel(
    x_ptr, w_ptr, inv_temp_ptr, target_ptr,                 # pointers: (T,C), (V,C), (1,), (T,)
    noise_ptr, seed_ptr, key_ptr, position_ptr,             # pointers, sampling: (1,), (1,), (T,), (T,)
    top_ptr, sum_ptr, logit_ptr, best_ptr, id_ptr,          # pointers, written: (T, TILES); logit (T,) when scoring
    T,
    V: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr, VTILE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, SAMPLE: tl.constexpr,
):
    """One program: VTILE logits of ROWS tokens, reduced at once to what the merge below needs; none is stored.

    C is walked in ascending steps into one FP32 accumulator, whatever ROWS is. Token tiles are fastest in the grid: a
    tile of the head, by far the largest operand, is read from memory once.
    """
    token_tiles = tl.cdiv(T, ROWS)
    tile = tl.program_id(0) // token_tiles
    row = (tl.program_id(0) % token_tiles) * ROWS + tl.arange(0, ROWS)
    col, c, row64, used = tile * VTILE + tl.arange(0, VTILE), tl.arange(0, STEP), row.to(tl.int64), row < T
    acc = tl.zeros((ROWS, VTILE), tl.float32)
    for begin in range(0, C, STEP):
        inside = begin + c[None, :] < C
        x = tl.load(x_ptr + row64[:, None] * C + begin + c[None, :], mask=used[:, None] & inside, other=0)
        w = tl.load(w_ptr + col.to(tl.int64)[:, None] * C + begin + c[None, :], mask=(col < V)[:, None] & inside, other=0)
        acc = tl.dot(x, tl.trans(w), acc)
    logits = tl.where((col < V)[None, :], acc * tl.load(inv_temp_ptr), float("-inf"))
    top = tl.max(logits, 1)
    at = row64 * TILES + tile
    tl.store(top_ptr + at, top, mask=used)
    tl.store(sum_ptr + at, tl.sum(tl.exp(logits - top[:, None]), 1), mask=used)
    if SAMPLE:
        key = tl.load(key_ptr + row, mask=used, other=0)
        low, high = (key & 0xFFFFFFFF).to(tl.uint32)[:, None], ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
        position = tl.load(position_ptr + row, mask=used, other=0)[:, None]
        bits, _, _, _ = tl.philox(tl.load(seed_ptr), col[None, :] + position * 0, position, low, high)
        perturbed = tl.fma(tl.load(noise_ptr), _gumbel(bits), logits)
        best = tl.max(perturbed, 1)
        target = tl.min(tl.where(perturbed == best[:, None], col[None, :], V - 1), 1)      # ties: the lowest id
        tl.store(best_ptr + at, best, mask=used)
        tl.store(id_ptr + at, target, mask=used)
        picked = tl.sum(tl.where(col[None, :] == target[:, None], logits, 0.0), 1)         # one term: exact
        tl.store(logit_ptr + at, picked, mask=used)
    else:
        target = tl.load(target_ptr + row, mask=used, other=-1)
        picked = tl.sum(tl.where(col[None, :] == target[:, None], logits, 0.0), 1)
        tl.store(logit_ptr + row, picked, mask=used & (target // VTILE == tile))


@jit
def _head_merge_kernel(
    top_ptr, sum_ptr, logit_ptr, best_ptr, id_ptr, token_ptr, logprob_ptr, lse_ptr,        # pointers
    V: tl.constexpr, TILES: tl.constexpr, VTILE: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):
    """One program: one token. Merges its TILES partials, in an order that TILES alone decides."""
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tops = tl.load(top_ptr + t * TILES + i, mask=i < TILES, other=float("-inf"))
    sums = tl.load(sum_ptr + t * TILES + i, mask=i < TILES, other=0)
    top = tl.max(tops, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    if SAMPLE:
        best = tl.load(best_ptr + t * TILES + i, mask=i < TILES, other=float("-inf"))
        token = tl.load(id_ptr + t * TILES + i, mask=i < TILES, other=V - 1)
        token = tl.min(tl.where(best == tl.max(best, 0), token, V - 1), 0)                 # ties: the lowest id
        tl.store(token_ptr + t, token.to(tl.int64))
        picked = tl.load(logit_ptr + t * TILES + token // VTILE)
    else:
        picked = tl.load(logit_ptr + t)
    tl.store(logprob_ptr + t, picked - top - log_sum)
    tl.store(lse_ptr + t, top + log_sum)


def _head_gpu(hidden, w, inv_temp, targets=None, noise=None, seed=None, keys=None, positions=None):
    """As head_ref. Tokens go in chunks: the partials of 4096 tokens at V = 151,936 are 2 x 19 MB."""
    (T, C), V, sampling = hidden.shape, len(w), targets is None
    _check_bf16(hidden, "the head's input")
    if C % 8 or not w.is_contiguous():
        raise ValueError(f"head: rows of {C} BF16 values are not on 16 bytes; hidden_size must be a multiple of 8")
    tiles, hidden = triton.cdiv(V, VTILE), hidden.contiguous()
    tokens = torch.empty(T, dtype=torch.int64, device=hidden.device) if sampling else targets.contiguous()
    logprobs, lse = (torch.empty(T, device=hidden.device) for _ in range(2))
    for i in range(0, T, 4096):
        x, n = hidden[i:i + 4096], min(4096, T - i)
        rows = 16 if n <= 16 else 64 if n <= 64 else 128    # measured to give equal bits: 16 rows a warp in each
        top, total, best = (torch.empty(n, tiles, device=x.device) for _ in range(3))
        best_id = torch.empty(n, tiles, dtype=torch.int32, device=x.device)
        # NaN stays where no program owns the target: an id outside the vocabulary shows.
        logit = torch.full((n, tiles) if sampling else (n,), torch.nan, device=x.device)
        mine = lambda y: None if y is None else y[i:i + 4096]
        _head_kernel[(triton.cdiv(n, rows) * tiles,)](
            x, w, inv_temp, mine(targets), noise, seed, mine(keys), mine(positions), top, total, logit, best, best_id,
            n, V, C, tiles, VTILE, rows, 64, sampling, num_warps=rows // 16, num_stages=3, enable_fp_fusion=False)
        _head_merge_kernel[(n,)](
            top, total, logit, best, best_id, mine(tokens), logprobs[i:i + 4096], lse[i:i + 4096], V, tiles, VTILE,
            triton.next_power_of_2(tiles), sampling, num_warps=4, enable_fp_fusion=False)
    return tokens, logprobs, lse


class _TokenLogprobs(torch.autograd.Function):
    CHUNK = 1024             # tokens whose logits exist at once in the backward pass: 0.6 GB of FP32 at V = 151,936

    @staticmethod
    def forward(ctx, hidden, head, targets, inv_temp):
        _, logprobs, lse = (_head_gpu if use_kernels(hidden) else head_ref)(hidden, head.data, inv_temp, targets)
        ctx.head = head
        ctx.save_for_backward(hidden, targets, inv_temp, lse)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        (hidden, targets, inv_temp, lse), w = ctx.saved_tensors, ctx.head.data
        dhidden, grad = torch.empty_like(hidden), grad.contiguous()
        for i in range(0, len(hidden), _TokenLogprobs.CHUNK):
            rows = slice(i, i + _TokenLogprobs.CHUNK)
            dlogits = _dlogits(hidden[rows], w, targets[rows], inv_temp, lse[rows], grad[rows])
            dhidden[rows] = _mm32(dlogits, w)
            _add_mm32(ctx.head.gradient(), dlogits.t(), hidden[rows])
        return dhidden, None, None, None


def _mm32(a, b):
    """a @ b with an FP32 result; the GPU multiplies the BF16 operands as they are, the CPU in FP32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _add_mm32(out, a, b):
    """out += a @ b in FP32, in place: the gradient of a large head is gigabytes, too much for a temporary."""
    if a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.addmm_(a.float(), b.float())


@jit
def _dlogits_kernel(
    logit_ptr, target_ptr, inv_temp_ptr, lse_ptr, grad_ptr, out_ptr,      # pointers
    V: tl.constexpr, BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one token, FP32 logits in, rounded gradients out; see `_dlogits`."""
    t, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inv_temp = tl.load(inv_temp_ptr)
    p = tl.exp(tl.load(logit_ptr + t * V + col, mask=col < V, other=0) * inv_temp - tl.load(lse_ptr + t))
    onehot = (col == tl.load(target_ptr + t)).to(tl.float32)
    out = (onehot - p) * (tl.load(grad_ptr + t) * inv_temp)
    tl.store(out_ptr + t * V + col, out.to(out_ptr.dtype.element_ty), mask=col < V)


def _dlogits(hidden, w, targets, inv_temp, lse, grad):
    """d loss / d(hidden w^T), rounded to hidden.dtype for the two products that follow: (onehot - softmax) * g / temp."""
    logits = _mm32(hidden, w.t())
    if not use_kernels(hidden):
        p = (logits * inv_temp - lse[:, None]).exp()
        onehot = F.one_hot(targets, len(w))
        return ((onehot - p) * (grad[:, None] * inv_temp)).to(hidden.dtype)
    out = torch.empty_like(logits, dtype=hidden.dtype)
    _dlogits_kernel[(len(out), triton.cdiv(len(w), 2048))](logits, targets, inv_temp, lse, grad, out, len(w), 2048,
                                                          num_warps=8, enable_fp_fusion=False)
    return out


def token_logprobs(hidden, head, targets, inv_temp):
    """log softmax(hidden head^T * inv_temp)[targets]: hidden (T,C), head Weight (V,C), targets (T,) int64 -> FP32 (T,).

    inv_temp: FP32 (1,) on the device, 1/temperature made on the host: a product has one rounding on every machine.
    """
    return _TokenLogprobs.apply(hidden, head, targets, inv_temp)


@torch.no_grad()
def sample(hidden, head, inv_temp, noise, seed, keys, positions):
    """Next tokens and their log-probabilities, with the bits of `token_logprobs`: -> (B,) int64, (B,) FP32.

    hidden (B,C); noise (1,) FP32: 1, or 0 for the most likely token; seed (1,) int64; keys (B,) int64 name the sequence
    and positions (B,) int32 the token: the noise depends on these three and the vocabulary id, not on slot or batch.
    """
    forward = _head_gpu if use_kernels(hidden) else head_ref
    return forward(hidden, head.data, inv_temp, None, noise, seed, keys, positions)[:2]


# ------------------------------------------------------------------------------------------------------------------
# Embedding

def embed_backward_ref(dx, tokens, grad):
    """Reference. grad[tokens[t]] += dx[t] in FP32, t ascending (on a GPU index_add_ has no fixed order)."""
    grad.index_add_(0, tokens, dx.float())


@jit(do_not_specialize=["T"])
def _embed_backward_kernel(
    dx_ptr, sorted_ptr, order_ptr, grad_ptr,                # pointers: (T,C), (T,), (T,), (V,C)
    T,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """Program (i, j): if sorted place i is the first of its token id, columns j of that id's whole sum.

    The sort is stable, so an id's rows come in token order, ROWS at a time; each row of grad has one writer.
    """
    i, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(sorted_ptr + i)
    first = token != tl.load(sorted_ptr + i - 1, mask=i > 0, other=-1)
    total, more, begin = tl.zeros((BLOCK,), tl.float32), first, i
    while more:
        row = begin + tl.arange(0, ROWS)
        same = tl.load(sorted_ptr + row, mask=row < T, other=-1) == token
        source = tl.load(order_ptr + row, mask=same, other=0)
        mask = same[:, None] & (col < C)[None, :]
        total += tl.sum(tl.load(dx_ptr + source[:, None] * C + col[None, :], mask=mask, other=0).to(tl.float32), 0)
        begin += ROWS
        more = tl.load(sorted_ptr + begin, mask=begin < T, other=-1) == token
    at, mask = grad_ptr + token * C + col, (col < C) & first
    tl.store(at, tl.load(at, mask=mask, other=0) + total, mask=mask)


def _embed_backward_gpu(dx, tokens, grad):
    (T, C), (ids, order) = dx.shape, tokens.sort(stable=True)
    if T:
        _embed_backward_kernel[(T, triton.cdiv(C, 512))](dx, ids, order, grad, T, C, 512, 16, num_warps=4,
                                                         enable_fp_fusion=False)


class _Embed(torch.autograd.Function):

    @staticmethod
    def forward(ctx, data, tokens, w):
        ctx.w = w
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, data)

    @staticmethod
    def backward(ctx, dx):
        backward = _embed_backward_gpu if use_kernels(dx) else embed_backward_ref
        backward(dx.contiguous(), *ctx.saved_tensors, ctx.w.gradient())
        return None, None, None


def embed(tokens, w):
    """Rows of w: tokens (T,) int64, w Weight (V,C) -> (T,C). The output requires grad: a backward pass starts here."""
    return _Embed.apply(w.data.detach().requires_grad_(), tokens, w)   # an input must require grad for torch to record
