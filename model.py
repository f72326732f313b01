"""
The transformer that the sampler and the trainer share, in the shape of Qwen2/2.5, Qwen3 and Llama 3.

Read it top down: the transformer (about as long as nanoGPT's), then what comes from a checkpoint folder (config, weights,
tokenizer, chat template), then, behind a banner, the kernels that only the model uses (attention, RoPE, head).

Every family is one block: h += attention(rmsnorm(h)); h += swiglu(rmsnorm(h)). They differ in three switches:

    family     bias on q, k, v    norm on q and k    head size
    Qwen2/2.5  yes                no                 C / H
    Qwen3      no                 yes                its own field
    Llama 3    no                 no                 C / H or its own field; RoPE frequencies may be stretched

The numerics contract (fp8.py tells why): whatever leads to a log-probability depends on the tokens of its own sequence
up to that position and on nothing else. So three passes over the same layers, the trainer's packed one, the sampler's
prefill and its one-token decode, give one hidden state for a position, bit for bit. They differ in `attend` only.

Shapes: T packed tokens, B sequences, C hidden, H query heads, G key/value heads, D head size, F width of the MLP,
V vocabulary, L layers.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import Weight
from _folder import *
from _kernels import *

PRECISIONS = ("bf16", "fp8-rollout", "fp8")


class Layer(nn.Module):
    """One block. q, k, v are one matrix and gate, up another: half as many products, each twice as wide."""

    def __init__(self, c, make):
        super().__init__()
        C, H, G, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.c = c
        self.input_norm = make((C,))
        self.qkv = make(((H + 2 * G) * D, C))
        self.qkv_bias = make(((H + 2 * G) * D,)) if c.qkv_bias else None
        self.q_norm = make((D,)) if c.qk_norm else None
        self.k_norm = make((D,)) if c.qk_norm else None
        self.o = make((C, H * D))
        self.post_norm = make((C,))
        self.gate_up = make((2 * c.intermediate_size, C))
        self.down = make((C, c.intermediate_size))

    def forward(self, h, delta, positions, table, attend, quantized):
        """h (T, C) is the residual stream and delta (T, C) what the last product still has to add to it (None at first).

        The addition is left to the next norm, which reads h anyway: one pass over memory instead of two.
        """
        c = self.c
        h, qkv = fp8.norm_linear(h, delta, self.input_norm, c.rms_norm_eps, self.qkv, self.qkv_bias, quantized)
        q, k, v = qk_norm_rope(qkv, self.q_norm, self.k_norm, c.rms_norm_eps, table, positions,
                               c.num_attention_heads, c.num_key_value_heads)      # (T, H, D), (T, G, D) twice
        o = attend(q, k, v).flatten(1)                                            # (T, H*D)
        delta = fp8.linear(o, self.o, fp8=quantized)                              # (T, C)
        h, gate_up = fp8.norm_linear(h, delta, self.post_norm, c.rms_norm_eps, self.gate_up, None, quantized)
        return h, fp8.swiglu_linear(gate_up, self.down, quantized)                # (T, C) twice


class Transformer(nn.Module):
    """A decoder whose linear layers hold BF16 weights, FP8 codes, or both.

    precision: "bf16"; "fp8-rollout" (the trainer multiplies in BF16, the sampler in FP8, quantized from the same BF16
    weights); "fp8" (both read the one set of FP8 codes). dtype is BF16, or FP32 with "bf16" on a CPU for comparisons.
    A new model has random weights; `from_pretrained` reads a Hugging Face folder.
    """

    def __init__(self, config, precision="fp8", device=None, dtype=torch.bfloat16, seed=0):
        super().__init__()
        if precision not in PRECISIONS:
            raise ValueError(f"precision is '{precision}': choose one of {', '.join(PRECISIONS)}")
        if dtype != torch.bfloat16 and precision != "bf16":
            raise ValueError(f"dtype is {dtype}: only precision='bf16' computes in another type than torch.bfloat16")
        self.config, self.precision, self.dtype = config, precision, dtype
        device = torch.device(device or "cpu")
        check_device(device, precision, config)
        keep = {"bf16": "data", "fp8-rollout": "both", "fp8": "codes"}[precision]

        def make(shape, quantize=True):   # matrices of the layers are quantized; vectors, embedding and head never
            return Weight(shape, dtype, device, keep if quantize and len(shape) == 2 else "data")

        C, V = config.hidden_size, config.vocab_size
        self.embedding = make((V, C), quantize=False)
        self.layers = nn.ModuleList(Layer(config, make) for _ in range(config.num_hidden_layers))
        self.norm = make((C,))
        self.head = self.embedding if config.tie_word_embeddings else make((V, C), quantize=False)
        # One FP32 table for all passes: the angle of a position never depends on the batch it is in.
        self.register_buffer("table", rope_table(config, config.max_position_embeddings, device), persistent=False)
        self.recompute = False            # the trainer sets it: keep two (T, C) tensors a layer, run the layer again
        if seed is not None:
            self.load(self.random_tensors(seed))

    # ---- the three passes ---------------------------------------------------------------------------------------

    def forward(self, tokens, seqlens):
        """The trainer's pass. tokens (T,) int64, sequences end to end; seqlens sum to T. -> hidden (T, C)."""
        packing = seqlens if isinstance(seqlens, Packing) else pack(seqlens, tokens.device)
        if packing.total != tokens.numel():
            raise ValueError(f"seqlens sum to {packing.total}, but there are {tokens.numel()} tokens")
        return self._run(tokens, packing.positions, lambda i, q, k, v: attention(q, k, v, packing),
                         self.precision == "fp8")

    @torch.no_grad()
    def prefill(self, tokens, seqlens, k_pages, v_pages, slots):
        """The sampler's pass over prompts: the trainer's, and each token's k and v go to slots (T,) of the pages."""
        packing = pack(seqlens, tokens.device)

        def attend(i, q, k, v):
            write_pages(k, v, k_pages[i], v_pages[i], slots)
            return attention(q, k, v, packing)
        self._run(tokens, packing.positions, attend, self.precision != "bf16")

    @torch.no_grad()
    def decode(self, tokens, positions, k_pages, v_pages, page_table, lengths, slots):
        """One token of each of B sequences: tokens (B,), positions (B,) int32 -> hidden (B, C).

        The token's k and v are written to slots (B,) first, so lengths (B,) int32 count it. A CUDA graph can hold all.
        """
        def attend(i, q, k, v):
            write_pages(k, v, k_pages[i], v_pages[i], slots)
            return paged_attention(q, k_pages[i], v_pages[i], page_table, lengths)
        return self._run(tokens, positions, attend, self.precision != "bf16")

    def _run(self, tokens, positions, attend, quantized):
        h, delta = embed(tokens, self.embedding), None                            # (T, C)
        for i, layer in enumerate(self.layers):
            args = (h, delta, positions, self.table, lambda q, k, v, i=i: attend(i, q, k, v), quantized)
            if self.recompute and torch.is_grad_enabled():
                h, delta = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                h, delta = layer(*args)
        return fp8.norm(h, delta, self.norm, self.config.rms_norm_eps)[1]          # (T, C)

    def logits(self, hidden):
        """(T, C) -> (T, V) in FP32. For looking and comparing: training and sampling never store logits."""
        if hidden.is_cuda:
            return torch.mm(hidden, self.head.data.t(), out_dtype=torch.float32)
        return fp8.matmul_rows(hidden.float(), self.head.data.float())

    # ---- weights ------------------------------------------------------------------------------------------------

    def weights(self):
        """{name: Weight}, each once; the names are those of `read_tensors` and of the optimizer."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Weight)}

    @torch.no_grad()
    def load(self, pairs):
        """Write every weight, in place, from (name, full-precision tensor) pairs; a missing or unknown name is an error."""
        weights = self.weights()
        for name, tensor in pairs:
            if name not in weights:
                raise ValueError(f"unknown or repeated weight '{name}': the model has no such tensor left to fill")
            if tuple(tensor.shape) != tuple(weights[name].shape):
                raise ValueError(f"weight '{name}' has shape {tuple(tensor.shape)}, the config asks for "
                                 f"{tuple(weights[name].shape)}")
            weights.pop(name).write(tensor)
        if weights:
            raise ValueError(f"no tensor was given for: {', '.join(weights)}")
        return self

    def random_tensors(self, seed=0):
        """(name, FP32 tensor) pairs of a fresh model: GPT-2's 0.02, less on the two matrices that write the residual."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.weights().items():
            if name.endswith("bias"):
                yield name, torch.zeros(weight.shape)
            elif name.endswith("norm"):
                yield name, torch.ones(weight.shape)
            else:
                std = 0.02 / (2 * len(self.layers)) ** 0.5 if name.endswith((".o", ".down")) else 0.02
                yield name, torch.randn(weight.shape, generator=generator) * std

    @classmethod
    def from_pretrained(cls, folder, precision="fp8", device=None, dtype=torch.bfloat16):
        """Read a Hugging Face folder (or, with huggingface_hub, a name like Qwen/Qwen3-0.6B)."""
        folder = folder_from_name(folder)
        config = Config.from_folder(folder)
        return cls(config, precision, device, dtype, seed=None).load(read_tensors(folder, config))

    def save_pretrained(self, folder, pairs=None):
        """Write a folder that any Hugging Face loader reads: BF16 weights under their usual names.

        pairs: (name, FP32 tensor) to write instead of the model's own values; the trainer passes its masters.
        """
        pairs = pairs or ((name, weight.full()) for name, weight in self.weights().items())
        write_tensors(folder, self.config, pairs)


def check_device(device, precision, config):
    """Refuse, before weights are loaded, what this device cannot compute."""
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise RuntimeError("device 'cuda' was asked for, but torch sees no CUDA device: check the driver, or use --device=cpu")
    major, minor = torch.cuda.get_device_capability(device)
    if precision != "bf16" and (major, minor) < (8, 9):
        raise RuntimeError(f"FP8 needs compute capability 8.9 or later, {torch.cuda.get_device_name(device)} has "
                           f"{major}.{minor}: use --precision=bf16")
    if config.head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim is {config.head_dim}: the attention kernel takes 16, 32, 64, 128 or 256")


