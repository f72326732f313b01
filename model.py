"""The transformer that the sampler and the trainer share, in the shape of Qwen2/2.5, Qwen3 and Llama 3.

Read it top down: the transformer (about as long as nanoGPT's), then what comes from a checkpoint folder
(config, weights, tokenizer, chat template), last the kernels of the model alone (RoPE, attention, head).

Every family is one block: h += attention(rmsnorm(h)); h += swiglu(rmsnorm(h)). They differ in three switches:

    family     bias on q, k, v    norm on q and k    head size
    Qwen2/2.5  yes                no                 C / H
    Qwen3      no                 yes                its own field
    Llama 3    no                 no                 C / H or its own field; RoPE frequencies may be stretched

The numerics contract (fp8.py tells why): whatever leads to a log-probability depends on the tokens of its own
sequence up to that position and on nothing else. So three passes over the same layers, the trainer's packed
one, the sampler's prefill and its one-token decode, give one hidden state for a position, bit for bit.

Shapes: T packed tokens, B sequences, C hidden, H query heads, G key/value heads, D head size, V vocabulary.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import re
import unicodedata
from pathlib import Path

import jinja2.sandbox
import safetensors.torch
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import (TensorDescriptor, Weight, jit, launch, matmul_rows, start_next, tl, triton, use_kernels,
                 wait_for_inputs)

PRECISIONS = ("bf16", "fp8-rollout", "fp8")
KV_TYPES = ("bf16", "fp8")


class Layer(nn.Module):
    """One block. q, k, v are one matrix and gate, up another: 4 products in place of 7, and wider ones."""

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

    def forward(self, h, delta, positions, table, attend, quantized, fp8_kv, cache=None, slots=None):
        """h (T, C) is the residual stream; delta (T, C), None at first, what the last product adds to it.

        The addition is left to the next norm, which reads h anyway: one pass over memory instead of two.
        cache: this layer's KV pages, to which each token's k and v are written at its slot; None in training.
        """
        c, eps = self.c, self.c.rms_norm_eps
        h, qkv = fp8.norm_linear(h, delta, self.input_norm, eps, self.qkv, self.qkv_bias, quantized)
        q, k, v = qk_norm_rope(qkv, self.q_norm, self.k_norm, eps, table, positions, c.num_attention_heads,
                               c.num_key_value_heads, fp8_kv, cache, slots)       # (T, H, D), (T, G, D) twice
        o = attend(q, k, v, cache)                # (T, H*D), in decode its codes and scales if quantized
        delta = fp8.linear(o, self.o, fp8=quantized)                              # (T, C)
        h, gate_up = fp8.norm_linear(h, delta, self.post_norm, eps, self.gate_up, None, quantized)
        return h, fp8.swiglu_linear(gate_up, self.down, quantized)                # (T, C) twice


class Transformer(nn.Module):
    """A decoder whose linear layers hold BF16 weights, FP8 codes, or both.

    precision: "bf16"; "fp8-rollout" (the trainer multiplies in BF16, the sampler in FP8, quantized from the
    same BF16 weights); "fp8" (both read the one set of FP8 codes). kv: "bf16", or "fp8": both round keys and
    values to E4M3, with a scale for each token and head, and the cache takes half the memory.
    dtype is BF16, or FP32 with "bf16" on a CPU for comparisons. A new model has random weights;
    `from_pretrained` reads a Hugging Face folder.
    """

    def __init__(self, config, precision="fp8", device=None, dtype=torch.bfloat16, seed=0, kv="bf16"):
        super().__init__()
        if precision not in PRECISIONS:
            raise ValueError(f"precision is '{precision}': choose one of {', '.join(PRECISIONS)}")
        if kv not in KV_TYPES:
            raise ValueError(f"kv is '{kv}': choose one of {', '.join(KV_TYPES)}")
        if dtype not in (torch.bfloat16, torch.float32) or dtype != torch.bfloat16 and precision != "bf16":
            raise ValueError(f"dtype {dtype}: BF16, or FP32 with precision='bf16' (FP16 would overflow)")
        self.config, self.precision, self.dtype, self.kv = config, precision, dtype, kv
        device = torch.device(device or "cpu")
        check_device(device, precision, config, kv, dtype)
        keep = {"bf16": "data", "fp8-rollout": "both", "fp8": "codes"}[precision]

        # Matrices of the layers are quantized; vectors, embedding and head never are.
        def make(shape, quantize=True):
            return Weight(shape, dtype, device, keep if quantize and len(shape) == 2 else "data")

        C, V = config.hidden_size, config.vocab_size
        self.embedding = make((V, C), quantize=False)
        self.layers = nn.ModuleList(Layer(config, make) for _ in range(config.num_hidden_layers))
        self.norm = make((C,))
        self.head = self.embedding if config.tie_word_embeddings else make((V, C), quantize=False)
        # One FP32 table for all passes: the angle of a position never depends on the batch it is in.
        table = rope_table(config, config.max_position_embeddings, device)
        self.register_buffer("table", table, persistent=False)
        # The trainer may set it: keep two (T, C) tensors a layer, and run the layer again for its gradient.
        self.recompute = False
        if seed is not None:
            self.load(self.random_tensors(seed))

    # ---- the three passes ----------------------------------------------------------------------------------

    def forward(self, tokens, seqlens, caches=None, slots=None):
        """The trainer's pass, or with caches `prefill`. tokens (T,) int64, sequences end to end, of lengths
        seqlens (or a Packing of them) -> hidden (T, C)."""
        packing = seqlens if isinstance(seqlens, Packing) else pack(seqlens, tokens.device)
        if packing.total != tokens.numel():
            raise ValueError(f"seqlens sum to {packing.total}, but there are {tokens.numel()} tokens")
        longest, most = max(packing.lengths, default=0), self.config.max_position_embeddings
        if longest > most:                # the kernels would read past the end of the RoPE table
            raise ValueError(f"{longest} tokens, the model takes {most} (max_position_embeddings)")
        attend = lambda q, k, v, cache: attention(q, k, v, packing).flatten(1)
        quantized = self.precision != "bf16" if caches else self.precision == "fp8"
        return self._run(tokens, packing.positions, attend, quantized, caches, slots)

    @torch.no_grad()
    def prefill(self, tokens, seqlens, caches, slots):
        """The sampler's pass over prompts: the trainer's, in FP8 with "fp8-rollout" too. Each token's k and v
        go to its slot (T,) of caches, the KV pages of each layer, by `new_caches`."""
        self.forward(tokens, seqlens, caches, slots)

    @torch.no_grad()
    def decode(self, tokens, positions, caches, page_table, lengths, slots):
        """One token of each of B sequences: tokens (B,) int64, positions (B,) int32 -> hidden (B, C). Its k
        and v are written to slots (B,) int64 first, so lengths (B,) int32 count it. page_table (B, pages)
        int32. A CUDA graph can hold all of it."""
        quantized = self.precision != "bf16"
        attend = lambda q, k, v, cache: paged_attention(q, cache, page_table, lengths, quantized)
        return self._run(tokens, positions, attend, quantized, caches, slots)

    def _run(self, tokens, positions, attend, quantized, caches, slots):
        h, delta = embed(tokens, self.embedding), None                            # (T, C)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers)):
            args = h, delta, positions, self.table, attend, quantized, self.kv == "fp8", cache, slots
            if self.recompute and torch.is_grad_enabled():
                h, delta = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                h, delta = layer(*args)
        return fp8.norm(h, delta, self.norm, self.config.rms_norm_eps)[1]          # (T, C)

    def new_caches(self, pages):
        """An empty KV cache of so many pages: a tuple of tensors, by `empty_cache`, for each layer."""
        c = self.config
        return [empty_cache(pages, c.num_key_value_heads, c.head_dim, self.kv == "fp8", self.dtype,
                            self.table.device) for _ in self.layers]

    def logits(self, hidden):
        """(T, C) -> (T, V) in FP32. For looking and comparing: training and sampling never store logits."""
        if hidden.is_cuda:
            return torch.mm(hidden, self.head.data.t(), out_dtype=torch.float32)
        return matmul_rows(hidden, self.head.data)

    # ---- weights -------------------------------------------------------------------------------------------

    def weights(self):
        """{name: Weight}, each once, as `read_tensors` and the optimizer name them."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Weight)}

    @torch.no_grad()
    def load(self, pairs):
        """Write every weight, in place, from (name, full-precision tensor) pairs: each once, and no other."""
        weights = self.weights()
        for name, tensor in pairs:
            if name not in weights:
                raise ValueError(f"weight '{name}': the model has no such tensor, or was given it before")
            if tensor.shape != weights[name].shape:
                raise ValueError(f"weight '{name}' of shape {tuple(weights[name].shape)} was given "
                                 f"{tuple(tensor.shape)}")
            weights.pop(name).write(tensor)
        if weights:
            raise ValueError(f"no tensor was given for: {', '.join(weights)}")
        return self

    def random_tensors(self, seed=0):
        """(name, FP32 tensor) pairs of a fresh model: GPT-2's 0.02, less in what writes the residual."""
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
    def from_pretrained(cls, folder, precision="fp8", device=None, dtype=torch.bfloat16, kv="bf16"):
        """Read a Hugging Face folder (or, with huggingface_hub, a name like Qwen/Qwen3-0.6B)."""
        folder = folder_from_name(folder)
        config = Config.from_folder(folder)
        tensors = read_tensors(folder, config)        # checks the files before any memory is taken
        return cls(config, precision, device, dtype, seed=None, kv=kv).load(tensors)

    def save_pretrained(self, folder, pairs=None):
        """Write a folder that any Hugging Face loader reads: BF16 weights under their usual names.

        pairs: (name, FP32 tensor) to write instead of the model's own values; the trainer passes its masters.
        """
        pairs = pairs or ((name, weight.full()) for name, weight in self.weights().items())
        write_tensors(folder, self.config, pairs)


def check_device(device, precision, config, kv, dtype):
    """Refuse, before weights are loaded, what this device or the kernels below cannot compute."""
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device: check the driver, or use --device=cpu")
    major, minor = torch.cuda.get_device_capability(device)
    if (precision, kv) != ("bf16", "bf16") and (major, minor) < (8, 9):
        raise RuntimeError(f"FP8 needs compute capability 8.9, {torch.cuda.get_device_name(device)} has "
                           f"{major}.{minor}: use --precision=bf16 --kv=bf16")
    C, H, G, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # TMA wants rows of 16 bytes, a decode tile has 16 rows, and FP32 products would round to TF32.
    for fits, given, taken in ((D in HEAD_SIZES, f"head_dim {D}", f"one of {HEAD_SIZES}"),
                               (H <= 16 * G, f"{H} query heads over {G} key heads", "at most 16 over each"),
                               (C % 8 == 0, f"hidden_size {C}", "multiples of 8"),
                               (dtype == torch.bfloat16, f"dtype {dtype}", "torch.bfloat16")):
        if not fits:
            raise ValueError(f"{given}: the GPU kernels take {taken}; use --device=cpu for others")


# ============================================================================================================
# Checkpoint folders: config.json, weights, tokenizer, chat template
#
# A folder is what Hugging Face tools read and write. Whatever would change the result and is not computed
# here is refused, with file, field and value: a field that is ignored in silence gives a model that looks
# right on short prompts. Faults are found before a weight is read: headers are checked first.
# ============================================================================================================


def _read_json(path):
    """The object in a JSON file (UTF-8, with or without a byte-order mark). ValueError names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: a checkpoint folder needs it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again")
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _short(value):
    """A JSON value for a message."""
    return json.dumps(value)[:200]


def _write(path, content):
    """A text, or JSON of anything else. In bytes, so that no newline is translated."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_bytes(text.encode())


def folder_from_name(name):
    """Path of a checkpoint folder: `name` itself, or "Org/Model" downloaded into the Hugging Face cache.
    FileNotFoundError prints the commands that fetch it where huggingface_hub is absent or fails."""
    if os.path.isdir(name):
        return str(name)
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file: give the folder that holds config.json and model.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no folder {name}: give a checkpoint folder, or a name like Qwen/Qwen3-0.6B")
    local = name.split("/")[1]
    commands = f"pip install huggingface_hub && hf download {name} --local-dir {local}   # then use {local}"
    try:
        import huggingface_hub
    except ImportError:
        raise FileNotFoundError(f"no folder {name}, and no huggingface_hub to download it:\n{commands}")
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"no folder {name}, and its download failed ({reason}):\n{commands}")


# ------------------------------------------------------------------------------------------------------------
# Config

FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Fields that change the result, with the values under which they do nothing. `null` or absence is fine too.
# What is neither here nor in Config (dtype, use_cache, ids of pad tokens, ...) enters no computation.
INERT = {
    "hidden_act": ["silu"], "use_sliding_window": [False], "mlp_bias": [False], "attention_dropout": [0],
    "pretraining_tp": [1], "partial_rotary_factor": [1], "rotary_pct": [1], "quantization_config": [{}],
    "compression_config": [{}], "num_experts": [0], "num_local_experts": [0], "n_routed_experts": [0],
    "moe_intermediate_size": [0], "text_config": [], "is_encoder_decoder": [False],
}


def _number(raw, name, *, where, kind=int, default=None):
    """raw[name] as a positive, finite int or float; `default` stands in for null and absence. A string or a
    NaN would surface later, as a strange shape or as NaN logits."""
    value = raw.get(name)
    value = default if value is None else value
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not 0 < value < 2**63:                                     # False for NaN as well
        raise ValueError(f"{where}: {name} is {value!r}, expected a positive {kind.__name__}")
    return kind(value)


@dataclasses.dataclass
class Config:
    """A dense decoder of the Qwen2, Qwen3 or Llama 3 family, under the names that config.json uses."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int                                   # need not be hidden_size / num_attention_heads
    max_position_embeddings: int
    model_type: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: dict | None = None             # None, or {"rope_type": "llama3", four numbers of Llama 3.1}
    tie_word_embeddings: bool = False
    eos_token_id: list = dataclasses.field(default_factory=list)    # all ids that end a completion

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type {self.model_type!r} is not supported, only {', '.join(FAMILIES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of channels")
        if max(self.eos_token_id, default=0) >= self.vocab_size:
            raise ValueError(f"eos_token_id {max(self.eos_token_id)} (here, in generation_config.json or in "
                             f"tokenizer_config.json) is beyond vocab_size {self.vocab_size}")

    qkv_bias = property(lambda self: self.model_type == "qwen2")
    qk_norm = property(lambda self: self.model_type == "qwen3")

    @classmethod
    def from_folder(cls, folder):
        """Reads config.json, and the EOS ids of its two neighbours."""
        where = Path(folder, "config.json")
        raw = _read_json(where)
        kind = raw.get("model_type")
        if kind is None and Path(folder, "log.jsonl").exists():
            raise ValueError(f"{folder} holds a run: give one of its checkpoints, {folder}/step-...")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(f"{where}: model_type {kind!r} is not supported, only {', '.join(FAMILIES)}")
        _refuse(raw, kind, where)
        theta, scaling = _read_rope(raw, where)
        size = functools.partial(_number, raw, where=where)  # defaults only where they are certain
        heads, hidden = size("num_attention_heads"), size("hidden_size")
        tied = raw.get("tie_word_embeddings")
        if tied not in (None, True, False):
            raise ValueError(f"{where}: tie_word_embeddings is {tied!r}, expected true or false")
        fields = dict(
            {name: size(name) for name in ("vocab_size", "intermediate_size", "num_hidden_layers",
                                           "max_position_embeddings")},
            hidden_size=hidden, num_attention_heads=heads, model_type=kind,
            num_key_value_heads=size("num_key_value_heads", default=heads if kind == "llama" else None),
            head_dim=size("head_dim", default=128 if kind == "qwen3" else hidden // heads),
            rms_norm_eps=size("rms_norm_eps", kind=float), rope_theta=theta, rope_scaling=scaling,
            tie_word_embeddings=bool(tied), eos_token_id=read_eos_ids(folder))
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def to_dict(self):
        """The content of config.json. Rotary settings go to their older place, which all readers know."""
        out = {"architectures": [FAMILIES[self.model_type]], **dataclasses.asdict(self)}
        eos = list(self.eos_token_id)
        out["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        out["bos_token_id"] = None                  # left out, transformers would fill in the 1 of Llama 2
        return out | {"hidden_act": "silu", "torch_dtype": "bfloat16"}

    def inv_freq(self):
        """Rotary frequencies in radians per position, FP32 (D/2,): the bits that transformers computes."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        freq = 1.0 / (self.rope_theta ** exponent)
        if self.rope_scaling is None:
            return freq
        # Llama 3.1: wavelengths beyond the original context are stretched by `factor`, those well within it
        # stay, and between the two limits the factor is blended in.
        s = self.rope_scaling
        low, high, length = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
        wavelength = 2 * math.pi / freq
        smooth = (length / wavelength - low) / (high - low)
        blended = (1 - smooth) * freq / s["factor"] + smooth * freq
        kept = torch.where(wavelength < length / high, freq, blended)
        return torch.where(wavelength > length / low, freq / s["factor"], kept)


def _refuse(raw, kind, where):
    """Raises ValueError for the first field of config.json that asks for something not computed here."""
    for name, allowed in INERT.items():
        value = raw.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{where}: {name} = {_short(value)} is not supported")
    # Qwen2 has its three biases whatever this field says; the others would get one on the output as well.
    if kind != "qwen2" and raw.get("attention_bias") not in (None, False):
        raise ValueError(f"{where}: attention_bias = {raw['attention_bias']!r} is not supported for {kind}")
    layers = raw.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        raise ValueError(f"{where}: layer_types = {_short(layers)}, only full_attention is supported")


def _read_rope(raw, where):
    """(theta, scaling or None) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, where
    transformers 5 keeps both. Two values, or no base, are refused: a wrong one shows only on long prompts."""
    rope = {}
    for place in ("rope_parameters", "rope_scaling", "rope_theta"):
        settings = raw.get(place)
        settings = {place: settings} if place == "rope_theta" else settings or {}
        if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
            raise ValueError(f"{where}: {place} = {_short(settings)}, expected an object of plain values")
        for name, value in settings.items():
            name = "rope_type" if name == "type" else name                     # an older spelling
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(f"{where}: {name} is {rope[name]!r} in one place and {value!r} in another")
    if "rope_theta" not in rope:
        raise ValueError(f"{where}: no rope_theta, at the top or in rope_parameters: add the model's value")
    number = functools.partial(_number, rope, where=where)
    theta, kind = number("rope_theta", kind=float), rope.get("rope_type")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{where}: partial_rotary_factor {rope['partial_rotary_factor']!r} is not supported")
    rest = rope.keys() - {"rope_theta", "rope_type", "partial_rotary_factor"}
    # Numbers without a type are scaling of some old kind; mrope hides behind the type "default".
    if kind is None and not rest or kind == "default" and "mrope_section" not in rest:
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{where}: rope_type {kind!r} with {sorted(rest)}: only default and llama3 are read")
    scaling = {name: number(name, kind=float) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"{where}: low_freq_factor is not below high_freq_factor in {scaling}")
    length = number("original_max_position_embeddings")
    return theta, {"rope_type": "llama3", **scaling, "original_max_position_embeddings": length}


def read_eos_ids(folder):
    """EOS ids of tokenizer_config.json (the end of a turn), then of generation_config.json and config.json.

    The three disagree in public checkpoints (a base model's document token, an instruct model's turn token),
    and a sampler that knows only one of them runs on past the end. Empty when no file names one: then nothing
    but the length limit stops a completion.
    """
    folder, ids, turn = Path(folder), set(), []
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _read_json(path).get("eos_token_id") if path.exists() else None
        named = [i for i in (value if isinstance(value, list) else [value]) if i is not None]
        if not all(type(i) is int and i >= 0 for i in named):
            raise ValueError(f"{path}: eos_token_id {value!r} holds something that is no token id")
        ids.update(named)
    path = folder / "tokenizer_config.json"
    token = _token_text(_read_json(path).get("eos_token")) if path.exists() else None
    if token is not None and (folder / "tokenizer.json").exists():
        raw = _read_json(folder / "tokenizer.json")
        try:
            known = raw["model"]["vocab"] | {t["content"]: t["id"] for t in raw.get("added_tokens") or []}
            turn = [known[token]]            # what the chat template closes a turn with, so it comes first
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: eos_token {token!r} is not in tokenizer.json ({error!r})") from None
    return turn + sorted(ids.difference(turn))


def _token_text(token):
    """tokenizer_config.json spells a token as a string or as {"content": string, ...}."""
    return token.get("content") if isinstance(token, dict) else token


# ------------------------------------------------------------------------------------------------------------
# Weights

DTYPES = "BF16", "F16", "F32"                # of tensors in files


def tensor_map(config):
    """{our name: [(Hugging Face name, shape), ...]}: the one place that fuses and splits. Parts of a fused
    matrix lie one after the other along its rows (the first axis)."""
    C, width, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    parts = {"embedding": [("model.embed_tokens.weight", (config.vocab_size, C))]}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        parts[ours + "input_norm"] = [(theirs + "input_layernorm.weight", (C,))]
        parts[ours + "qkv"] = [(f"{attn}{x}_proj.weight", (n, C)) for x, n in zip("qkv", (q, kv, kv))]
        if config.qkv_bias:
            parts[ours + "qkv_bias"] = [(f"{attn}{x}_proj.bias", (n,)) for x, n in zip("qkv", (q, kv, kv))]
        if config.qk_norm:
            parts[ours + "q_norm"] = [(attn + "q_norm.weight", (D,))]
            parts[ours + "k_norm"] = [(attn + "k_norm.weight", (D,))]
        parts[ours + "o"] = [(attn + "o_proj.weight", (C, q))]
        parts[ours + "post_norm"] = [(theirs + "post_attention_layernorm.weight", (C,))]
        parts[ours + "gate_up"] = [(f"{mlp}{x}_proj.weight", (width, C)) for x in ("gate", "up")]
        parts[ours + "down"] = [(mlp + "down_proj.weight", (C, width))]
    parts["norm"] = [("model.norm.weight", (C,))]
    if not config.tie_word_embeddings:
        parts["head"] = [("lm_head.weight", (config.vocab_size, C))]
    return parts


def _open_safetensors(path):
    """A safetensors handle, once the library has found that header and size of the file fit."""
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        with open(path, "rb") as file:
            pointer = file.read(8) == b"version "
        if pointer:
            raise ValueError(f"{path} is a Git LFS pointer, not weights: run git lfs pull")
        raise ValueError(f"download {path} again: cut off, or not what its header describes ({error})")
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error})")


def _find_tensors(folder):
    """{Hugging Face name: open file that holds it}, from model.safetensors or from the shards that the index
    names (and no others: a stray shard may belong to another model)."""
    # A whole file goes before an index, as in transformers: a saved model may lie beside old shards.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        handle = _open_safetensors(single)
        return {name: (handle, single) for name in handle.keys()}
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name} (.bin is not read)")
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise ValueError(f"{index}: weight_map is missing, or does not map tensor names to file names")
    # Compared as names: in the Hugging Face cache the files themselves are links that lead elsewhere.
    for name, file in where.items():
        if Path(file).name != file:
            raise ValueError(f"{index}: {name} lies in {file!r}, which is not a file name inside the folder")
    missing = sorted({file for file in where.values() if not (folder / file).is_file()})
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, named in {index.name}: download again")
    handles = {file: _open_safetensors(folder / file) for file in sorted(set(where.values()))}
    return {name: (handle, folder / file) for file, handle in handles.items() for name in handle.keys()
            if where.get(name) == file}


def read_tensors(folder, config):
    """Iterator of (our name, tensor in the file's dtype) over the weights of a checkpoint folder.

    Names, shapes and dtypes are checked in the call itself, from the headers alone; reading starts with the
    first item. ValueError or FileNotFoundError names file, tensor and remedy.
    """
    found, parts = _find_tensors(Path(folder)), tensor_map(config)
    expected = {name: shape for pieces in parts.values() for name, shape in pieces}
    # Ignored: rotary frequencies of old Llama files, which follow from config.json, and a head that repeats
    # the tied embedding. Anything else must be wanted (an FP8 file's scales are not).
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    extra = {name for name in found.keys() - expected.keys() if not name.endswith(".rotary_emb.inv_freq")}
    if config.tie_word_embeddings:
        extra.discard(head)
    missing = expected.keys() - found.keys()
    for name, (file, path) in found.items():
        dtype, shape = file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} is {dtype}, not {', '.join(DTYPES)}: take unquantized weights")
        if name in expected and shape != expected[name]:
            raise ValueError(f"{path}: {name} has shape {shape}, config.json asks for {expected[name]}")
    if missing or extra:
        what, names = ("lacks", missing) if missing else ("has unexpected", extra)
        tied = " (tie_word_embeddings is false)" if missing == {head} else ""
        raise ValueError(f"{folder} {what} {len(names)} tensor(s), {', '.join(sorted(names)[:4])}{tied}: "
                         f"config.json, the weights and their index do not match")
    read = lambda name: found[name][0].get_tensor(name)
    if head in found and head not in expected and not torch.equal(read(head), read(embedding)):
        raise ValueError(f"{found[head][1]}: {head} differs from {embedding}: not tie_word_embeddings = true")
    fuse = lambda tensors: tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return ((ours, fuse([read(name) for name, _ in pieces])) for ours, pieces in parts.items())


def write_tensors(folder, config, pairs):
    """Writes config.json, generation_config.json and model.safetensors (BF16, Hugging Face names) from (our
    name, tensor) pairs."""
    parts, out = tensor_map(config), {}
    for name, tensor in pairs:
        if name not in parts:
            raise ValueError(f"tensor '{name}': the model has no such tensor, or was given it before")
        pieces = parts.pop(name)
        for (theirs, _), piece in zip(pieces, tensor.detach().split([shape[0] for _, shape in pieces])):
            # Copied even when nothing is converted: safetensors refuses pieces that share one storage.
            out[theirs] = piece.to("cpu", torch.bfloat16, copy=True).contiguous()
    if parts:
        raise ValueError(f"tensors not given: {', '.join(sorted(parts)[:4])}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.to_dict()
    _write(folder / "config.json", settings)
    _write(folder / "generation_config.json", {"eos_token_id": settings["eos_token_id"]})
    safetensors.torch.save_file(out, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------------------
# Tokenizer

# Byte-level BPE files spell bytes as characters: visible Latin-1 stands for itself, the other 68 bytes get
# the characters from U+0100 on (so a space is "Ġ").
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [b for b in range(256) if b not in _VISIBLE]
BYTE_TO_CHAR = [chr(b) if b in _VISIBLE else chr(256 + _HIDDEN.index(b)) for b in range(256)]
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?!%s)|\s+"
GPT2_SPLIT = _WORDS % (r" ?\p{N}+", r"\S")                  # what "ByteLevel" with use_regex stands for
# The same after "Digits" has cut out every digit: a digit takes no space before it, and a run of spaces
# before one stays whole, as at the end of a text.
DIGITS_SPLIT = _WORDS % (r"\p{N}", r"[^\s\p{N}]")
# Constructs that the tokenizers library (Oniguruma) and tiktoken (Rust) read differently.
_DIALECT = re.compile(r"\\[hHRXKGZzAbB]|(?<!\\)\$|(?<![\\\[])\^|&&|\[\[|\\p\{\^")


def _bytes_of(token):
    """The bytes of a vocabulary entry; KeyError if a character stands for no byte."""
    return bytes(map(CHAR_TO_BYTE.__getitem__, token))


def _split_pattern(pre, where):
    """The regular expression that cuts text into words before merging; ValueError if one cannot say it."""
    steps = pre.get("pretokenizers") if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, **level}]:
            return GPT2_SPLIT if level.get("use_regex", True) else r"(?s:.+)"
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, **level}] if level.get("use_regex", True):
            return DIGITS_SPLIT
        case [{"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", **split},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
              ] if not split.get("invert"):
            pass                                        # one of the file's own, which is checked below
        case _:
            raise ValueError(f"{where}: pre_tokenizer {_short(pre)} is not supported")
    if _DIALECT.search(pattern):
        raise ValueError(f"{where}: split pattern {pattern!r} uses {_DIALECT.search(pattern).group()!r}, "
                         f"which regular expression engines read differently")
    # tiktoken panics on an empty match. Python's own engine can tell, given some other class for \\p{...}.
    if re.match(re.sub(r"\\[pP](\{[^}]*\}|\w)", r"\\w", pattern), ""):
        raise ValueError(f"{where}: split pattern {pattern!r} matches an empty text")
    return pattern


def _read_merges(model, where):
    """The vocabulary's byte pair merges as tiktoken wants them: ({bytes: rank}, [id of each rank]).

    tokenizer.json lists the pairs that may merge, in order; tiktoken merges any two neighbours whose union is
    a token, lowest rank first. Ranked in the order of the list, a file does the same under tiktoken if it is
      - complete: it lists every two tokens whose union is one (Llama 3, converted from a tiktoken file); or
      - unique: no token arises but from its listed halves (trained files: Qwen, SmolLM2). A token's bytes
        alone merge in one certain way, so it is enough that its listed halves `meet` on that way: then no
        other two can.
    Ranks 0..255 are the bytes; -1 is the id of a byte that the vocabulary lacks.
    """
    vocab, whole_words = model["vocab"], bool(model.get("ignore_merges"))
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    bad = next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()), None)
    if bad is not None:
        raise ValueError(f"{where}: merge {bad} is not a pair of tokens whose union is in the vocabulary")
    tokens = [token for token, _ in itertools.groupby(merges, "".join)]
    known = {*BYTE_TO_CHAR, *tokens}
    complete = whole_words and len(known) == 256 + len(tokens) and set(merges) == {
        (t[:i], t[i:]) for t in tokens for i in range(1, len(t)) if t[:i] in known and t[i:] in known}
    ranks = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}      # token (one character a byte) -> rank
    halves, made = [None] * 256, {}             # rank -> ranks of its two halves; ranks of two halves -> rank

    def meet(x, y, limit):
        """Whether tokens x|y stand side by side when merge `limit` is due, in a text of their bytes alone:
        walks back in time, undoing the younger of the two, and looks for an older merge across the border. Of
        two equal merges the left one comes first."""
        while made.get((x, y), limit) >= limit:
            if max(x, y) < 256:
                return True                                             # two bytes: the beginning
            if x > y:
                limit, x = x, halves[x][1]
            else:
                limit, y = y + 1, halves[y][0]
        return False

    for pair, token in zip(merges, map("".join, merges)):
        x, y, rank = ranks.get(pair[0]), ranks.get(pair[1]), len(ranks)
        if token not in ranks and (complete or None not in (x, y) and meet(x, y, rank)):
            ranks[token] = made[x, y] = rank
            halves.append((x, y))
    # tiktoken takes a word that is a token as it is, even where merging would not make it. So does
    # ignore_merges, but tiktoken might make such a token within longer words as well.
    lost = next(iter((known | (vocab.keys() if whole_words else set())) - ranks.keys()), None)
    if lost is not None:
        raise ValueError(f"{where}: token {lost!r} is made by no merge in its turn: tiktoken cannot say that")
    return {_bytes_of(token): rank for token, rank in ranks.items()}, [vocab.get(t, -1) for t in ranks]


BYTES_TEMPLATE = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}\
{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


class Tokenizer:
    """Text to ids and back, equal to the tokenizers library on the same tokenizer.json, on top of tiktoken.

    No BOS is added, whatever the file's post_processor says: a chat template writes its own, and two are one
    too many. Truncation and padding settings of the file are not used either.
    """

    def __init__(self, files, eos_ids, where="tokenizer.json"):
        """files: {"tokenizer.json": object, "tokenizer_config.json": object, "chat_template.jinja": str}, the
        last two optional; `where` stands in messages for the path of the first."""
        self.files, self.eos_ids, self.where = files, list(eos_ids), where
        # Some templates print the date: one day for all prompts of a run, also of one that is resumed later.
        self.now = datetime.datetime.combine(datetime.date.today(), datetime.time())
        raw = files["tokenizer.json"]
        try:
            self._check(raw)
            ranks, self._ids = _read_merges(raw["model"], where)        # rank -> id
            self._bytes = {i: _bytes_of(token) for token, i in raw["model"]["vocab"].items()
                           if CHAR_TO_BYTE.keys() >= set(token)}        # id -> bytes
            pattern = _split_pattern(raw.get("pre_tokenizer"), where)
            # Added tokens are cut out before tiktoken sees the text: most are exempt from normalization.
            self._encoding = tiktoken.Encoding(where, pat_str=pattern, mergeable_ranks=ranks,
                                               special_tokens={})
            self._added = self._read_added(raw)
            if not all(type(i) is int and 0 <= i < 2**31 for i in self._bytes):
                raise ValueError(f"{where}: a token has an id that is no whole number from 0 on")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: not the tokenizer.json of a byte-level BPE ({error!r})") from error
        except (ValueError, re.error) as error:         # from here, or about the pattern
            raise ValueError(f"{where}: split pattern: {error}" if where not in str(error) else str(error))
        self.vocab_size = max(self._bytes) + 1

    @classmethod
    def from_pretrained(cls, folder):
        """Reads tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja."""
        folder = Path(folder)
        files = {"tokenizer.json": _read_json(folder / "tokenizer.json")}
        settings, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        if settings.exists():
            files[settings.name] = _read_json(settings)
        if template.exists():
            try:
                files[template.name] = template.read_bytes().decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{template} is not UTF-8 ({error})") from None
        return cls(files, read_eos_ids(folder), str(folder / "tokenizer.json"))

    @classmethod
    def bytes(cls):
        """The tokenizer of models trained from scratch: a byte is its own id, four special tokens follow."""
        special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        added = [{"id": 256 + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                  "normalized": False, "special": True} for i, token in enumerate(special)]
        model = {"type": "BPE", "vocab": {c: b for b, c in enumerate(BYTE_TO_CHAR)}, "merges": []}
        raw = {"version": "1.0", "added_tokens": added, "model": model, "pre_tokenizer": level,
               "decoder": level}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0],
                    "clean_up_tokenization_spaces": False, "chat_template": BYTES_TEMPLATE}
        return cls({"tokenizer.json": raw, "tokenizer_config.json": settings}, [256])

    def save(self, folder):
        """Writes the files that it was made from."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            _write(Path(folder, name), content)

    def _check(self, raw):
        """Refuses the parts of tokenizer.json that would give other ids than those computed here."""
        model, decoder = raw["model"], raw.get("decoder")
        inert = {"type": ["BPE", None], "dropout": [None, 0], "continuing_subword_prefix": [None, ""],
                 "end_of_word_suffix": [None, ""]}
        for name, allowed in inert.items():
            if model.get(name) not in allowed:
                raise ValueError(f"{self.where}: model {name} = {model[name]!r} is not supported")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise ValueError(f"{self.where}: decoder {_short(decoder)} is not supported")
        normalizer = raw.get("normalizer") or {"type": "Sequence", "normalizers": []}
        steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        if any(step["type"] != "NFC" for step in steps):
            raise ValueError(f"{self.where}: normalizer {_short(normalizer)} is not supported, only NFC")
        self._nfc = bool(steps)

    def _normalize(self, text):
        """NFC where the file asks for it. Python's Unicode tables are newer than the tokenizers library's,
        which does not reorder about a hundred recent marks of rare scripts."""
        return unicodedata.normalize("NFC", text) if self._nfc else text

    def _read_added(self, raw):
        """Two (regular expression, {content: (id, special)}), for tokens looked for in the raw and in the
        normalized text. The longest of several at one place wins."""
        tables = {}, {}
        for token in raw.get("added_tokens") or []:
            for name in ("single_word", "lstrip", "rstrip"):
                if token.get(name):
                    raise ValueError(f"{self.where}: token {token['content']!r}: {name} is not supported")
            if not token["content"]:
                continue
            text = self._normalize(token["content"]) if token["normalized"] else token["content"]
            tables[bool(token["normalized"])][text] = token["id"], token["special"]
            self._bytes[token["id"]] = token["content"].encode()
        longest_first = [sorted(table, key=len, reverse=True) for table in tables]
        return [(re.compile("|".join(map(re.escape, texts)) or r"(?!)"), table)
                for texts, table in zip(longest_first, tables)]

    def _cut(self, text, added, parse_special, encode):
        """Ids of a text: its added tokens, and what `encode` makes of each piece between them."""
        ids, start, (regex, table) = [], 0, added
        for match in regex.finditer(text):
            token, special = table[match.group()]
            if parse_special or not special:
                ids += *encode(text[start:match.start()]), token
                start = match.end()
        return ids + encode(text[start:])

    def encode(self, text, parse_special=True):
        """Ids of a text. Special tokens in the text become their ids; parse_special=False takes them as plain
        text (added tokens that the file does not call special, such as Qwen's <think>, are parsed either way,
        as in the tokenizers library). Lone surrogates become U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        raw, normalized = self._added
        rest = lambda piece: self._cut(self._normalize(piece), normalized, parse_special, self._encode_plain)
        return self._cut(text, raw, parse_special, rest)

    def _encode_plain(self, text):
        """Ids of normalized text without added tokens; tiktoken's ranks become the file's ids."""
        ids = [self._ids[rank] for rank in self._encoding.encode_ordinary(text)]
        if -1 in ids:
            lacking = {byte for byte in range(256) if self._ids[byte] == -1}
            char = next(c for c in text if lacking & set(c.encode()))
            raise ValueError(f"{self.where}: no token for the bytes of {char!r}: remove it from the text")
        # tiktoken drops what the pattern does not match, the tokenizers library keeps it.
        if sum(len(self._bytes[i]) for i in ids) != len(text.encode()):
            raise ValueError(f"{self.where}: the split pattern leaves out a part of {text[:80]!r}")
        return ids

    def decode(self, ids):
        """Text of a list of ids, special tokens included. Bytes that are no UTF-8 become U+FFFD; ids beyond
        the tokenizer (rows that pad the vocabulary) give nothing."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def chat(self, messages, thinking=None):
        """Ids of [{"role": ..., "content": ...}, ...] and the answer's opening, by the checkpoint's template.

        thinking: None leaves the template's default; True or False is its variable enable_thinking. As in
        Hugging Face's apply_chat_template the rendered text is parsed as a whole, so a special token that a
        message spells out becomes one.
        """
        return self.encode(self.render(messages, thinking))

    @property
    def template(self):
        """Source of the checkpoint's chat template, or None (a base model)."""
        settings = self.files.get("tokenizer_config.json", {})
        source = self.files.get("chat_template.jinja", settings.get("chat_template"))
        if isinstance(source, list):                    # several named templates
            source = {t.get("name"): t.get("template") for t in source}.get("default")
        return source if isinstance(source, str) else None

    @functools.cached_property
    def _compiled(self):
        """The template in jinja: sandboxed, as code from a download, with settings that templates need."""
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=["jinja2.ext.loopcontrols"])
        # jinja's own filter escapes <, > and & for HTML.
        env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)

        def raise_exception(message):
            raise jinja2.TemplateError(message)
        env.globals |= {"raise_exception": raise_exception,
                        "strftime_now": lambda form: self.now.strftime(form)}      # `now` as it is by then
        return env.from_string(self.template)

    def render(self, messages, thinking=None):
        """The text that `chat` encodes."""
        settings = self.files.get("tokenizer_config.json", {})
        if self.template is None:
            raise ValueError(f"{self.where}: no chat template beside it (a base model?): encode plain text")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: _token_text(settings[name]) for name in names if settings.get(name) is not None}
        if thinking is not None:
            values["enable_thinking"] = thinking
        try:
            return self._compiled.render(messages=messages, tools=None, documents=None,
                                         add_generation_prompt=True, **values)
        except Exception as error:  # a template is a program of its own, which may raise anything
            raise ValueError(f"{self.where}: the chat template failed: {error}") from error


# ============================================================================================================
# The kernels that only the model uses: RoPE and q/k norm, attention (packed and paged), head, embedding
#
# Each topic has the order of fp8.py: torch reference, Triton kernel, wrapper, autograd function. For the
# numerics contract sums split at fixed places or not at all, there is one KV tile, and softmax rows lie
# within one warp.
# ============================================================================================================

# Keys of one attention step == page of the cache: training, prefill and decode share it. 128 make the forward
# pass no faster on an H200 at head size 128, and slower at 64.
PAGE = 64
# Keys of one softmax, to be merged with the next: decode runs them side by side. Without, a step of a lone
# sequence of 16,384 tokens takes 3.4 times as long (`bench.py rules`). With half as many keys it is faster
# still, but large batches and the forward pass are slower.
SPLIT = 1024
VTILE = 256                  # vocabulary columns of one (max, sum) partial in the head
HEAD_SIZES = 16, 32, 64, 128     # that the attention kernels take
LOG2E = 1.4426950408889634   # the GPU has exp2 only: log2(e) is folded into the softmax scale


# ------------------------------------------------------------------------------------------------------------
# Packing: sequences laid end to end, and the tiles that attention walks


def to_device(x, device):
    """A CPU tensor on the device. From pinned memory, so that the host need not wait for the GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Packing:
    """Where B sequences lie in T packed tokens. Made by `pack`; every tensor is int32 on the model's device.

    positions (T,) in the token's own sequence; tiles (N, 4): one row for each attention tile of `rows`
    queries, (first packed row of the sequence, first query in the sequence, length, first row of the sequence
    where each is padded to whole tiles, N * rows in all)."""

    def __init__(self, lengths, device):
        # 128 rows are 8 warps of the backward pass, 2 programs of the forward pass. The CPU computes whole
        # padded tiles: 16 waste less.
        self.rows = 128 if device.type == "cuda" else 16
        start, tiles, padded = 0, [], 0
        for length in lengths:
            tiles += [(start, first, length, padded) for first in range(0, length, self.rows)]
            start += length
            padded += fp8.round_up(length, self.rows)
        # Causal work grows with `first`: the longest tiles start first, and the last to finish are short.
        tiles.sort(key=lambda tile: -tile[1])
        on_device = lambda x: to_device(torch.as_tensor(x, dtype=torch.int32), device)
        self.lengths, self.total = lengths, start
        self.positions = on_device(torch.cat([torch.arange(n) for n in (0, *lengths)]))
        self.tiles = on_device(tiles).view(-1, 4)


def pack(seqlens, device):
    """Lengths (a list, or an int64 tensor on the CPU; zeros allowed) -> Packing on `device`."""
    lengths = torch.as_tensor(seqlens, dtype=torch.int64)
    if lengths.ndim != 1 or lengths.is_cuda or (len(lengths) and int(lengths.min()) < 0):
        raise ValueError(f"pack: seqlens must be a flat list of lengths >= 0, on the CPU; got {seqlens!r}")
    return Packing(lengths.tolist(), torch.device(device))


# ------------------------------------------------------------------------------------------------------------
# From the fused QKV rows to q, k, v: norm of q and k, RoPE, FP8 KV, and the pages of the cache


def rope_table(config, length, device):
    """FP32 (length, D): cosines of the D/2 angles, then their sines, by position in the token's own sequence;
    computed on the CPU whatever the device, so that every machine rotates by the same bits."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.inv_freq())
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def empty_cache(pages, G, D, fp8_kv, dtype, device):
    """A layer's cache: k, v (pages, G, PAGE, D), zeros: what a decode program reads of a page lies side by
    side. In FP8 codes, in the order of `code_places`, and their FP32 scales (pages, G, PAGE) twice."""
    zeros = lambda *shape, dtype: torch.zeros(pages, G, PAGE, *shape, dtype=dtype, device=device)
    values = [zeros(D, dtype=fp8.E4M3 if fp8_kv else dtype) for _ in "kv"]
    scales = [zeros(dtype=torch.float32) for _ in "kv"] if fp8_kv else []
    return *values, *scales


def code_places(D, device):
    """Where the code of key j, element d, lies among the PAGE * D of one head on a page: (PAGE, D) for k, v.

    As the registers of a warp take the right operand of a tensor-core product, 16 deep and 8 wide: thread
    4n + l holds column n at depths 2l, 2l + 1, 2l + 8 and 2l + 9, hence 4 codes side by side, and 16 with the
    next products' (k: deeper, so that a key's codes stay together; v: wider). Then a program reads 16 bytes
    a thread and widens them in place; rows of codes would go through shared memory twice.
    """
    byte, deep, wide = torch.arange(PAGE * D, device=device), min(D // 16, 4), min(D // 8, 4)
    k = byte.view(-1, PAGE, 4, deep, 2, 2).permute(1, 0, 3, 4, 2, 5)                # depth d, column j
    v = byte.view(PAGE // 16, -1, 8, 4, wide, 2, 2).permute(0, 5, 3, 6, 1, 4, 2)    # depth j, column d
    return k.reshape(PAGE, D), v.reshape(PAGE, D)


def quantize_heads_reference(x):
    """x (T, G, D) -> E4M3 codes (T, G, D), FP32 scales (T, G), and codes * scales in x.dtype: (T, G, D).

    A scale is that of fp8.py, amax/448, rounded up to a power of two: then the product has no rounding of its
    own, and attention over codes has the bits of attention over BF16. NaN and Inf stay in the scale; beyond
    57,344 = 128 * 448 codes saturate, as decode multiplies by the scale times 2^120.
    """
    scale = x.float().abs().amax(2, keepdim=True).clamp(min=fp8.AMAX_FLOOR) / fp8.E4M3_MAX
    power = (scale.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32).clamp(max=128.0)
    scale = torch.where(scale < torch.inf, power, scale)
    codes = (x.float() / scale).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(fp8.E4M3)
    return codes, scale[:, :, 0], (codes.float() * scale).to(x.dtype)


def write_pages_reference(values, cache, slots):
    """Token t of `values`, (T, G, D) or (T, G) each, goes to page slots[t] // PAGE, place slots[t] % PAGE."""
    page, key = slots // PAGE, slots % PAGE
    if len(cache) == 4:
        for x, pages, places in zip(values, cache, code_places(cache[0].shape[3], slots.device)):
            pages.flatten(2)[page[:, None], :, places[key]] = x.mT
        values, cache = values[2:], cache[2:]
    for x, pages in zip(values, cache):
        pages[page, :, key] = x


def qk_norm_rope_reference(qkv, q_weight, k_weight, eps, table, positions, H, G, fp8_kv, cache, slots):
    """q and k heads: RMS norm (rounded to qkv.dtype), rotation (rounded again). v heads: copied."""
    T, D = len(qkv), qkv.shape[1] // (H + 2 * G)
    cos, sin = table[positions.long()].view(T, 1, D).chunk(2, dim=2)
    q, k, v = qkv.view(T, -1, D).split([H, G, G], dim=1)
    turned = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.float()
        if weight is not None:
            rstd = 1 / fp8.sqrt_reference(x.square().sum(-1, keepdim=True) / D + eps)
            x = (x * rstd * weight.float()).to(qkv.dtype).float()
        a, b = x.chunk(2, dim=2)
        turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2).to(qkv.dtype))
    (q, k), v = turned, v.contiguous()
    stored = k, v
    if fp8_kv:
        (k_codes, k_scale, k), (v_codes, v_scale, v) = map(quantize_heads_reference, (k, v))
        stored = k_codes, v_codes, k_scale, v_scale
    if cache:
        write_pages_reference(stored, cache, slots)
    return q, k, v


def qk_norm_rope_backward_reference(dq, dk, dv, qkv, q_weight, k_weight, eps, table, positions):
    """Gradients of q, k, v -> d(qkv), and the FP32 (D,) gradients of the two norm weights (or None)."""
    (T, H, D), G = dq.shape, dk.shape[1]
    cos, sin = table[positions.long()].view(T, 1, D).chunk(2, dim=2)
    grads, weight_grads = [], []
    for g, x, weight in zip((dq, dk), qkv.view(T, -1, D).split([H, G, G], dim=1)[:2], (q_weight, k_weight)):
        a, b = g.float().chunk(2, dim=2)
        g = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=2)  # a rotation's transpose turns it back
        if weight is not None:
            rstd = 1 / fp8.sqrt_reference(x.float().square().sum(-1, keepdim=True) / D + eps)
            x_hat = x.float() * rstd
            weight_grads.append((g * x_hat).sum((0, 1)))
            g = g * weight.float()
            g = rstd * (g - x_hat * ((g * x_hat).sum(-1, keepdim=True) / D))
        else:
            weight_grads.append(None)
        grads.append(g.to(qkv.dtype))
    return torch.cat(grads + [dv], dim=1).view(T, -1), *weight_grads


@jit
def load_heads(at, q_weight, k_weight, eps, mask, is_q, D: tl.constexpr):
    """One (heads, D/2) pair of halves at `at` in FP32, their norm weights, and 1/RMS by head."""
    i = tl.arange(0, D // 2)[None, :]
    lo = tl.load(at + i, mask=mask, other=0).to(tl.float32)
    hi = tl.load(at + D // 2 + i, mask=mask, other=0).to(tl.float32)
    w_lo, w_hi, rstd = lo, hi, lo
    if q_weight is not None:
        w_lo = tl.where(is_q, tl.load(q_weight + i), tl.load(k_weight + i)).to(tl.float32)
        w_hi = tl.where(is_q, tl.load(q_weight + D // 2 + i), tl.load(k_weight + D // 2 + i)).to(tl.float32)
        square = tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, D * 1.0) + eps))[:, None]
    return lo, hi, w_lo, w_hi, rstd


@jit
def store_halves(at, lo, hi, mask, D: tl.constexpr):
    i = tl.arange(0, D // 2)[None, :]
    tl.store(at + i, lo.to(at.dtype.element_ty), mask=mask)
    tl.store(at + D // 2 + i, hi.to(at.dtype.element_ty), mask=mask)


@jit
def round_to_code(x):
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@jit
def store_codes(pages, codes, j, d, is_k, mask, D: tl.constexpr, PAGE: tl.constexpr):
    """Elements d of key j, E4M3 (heads, D/2), to a page of each head, in the order of `code_places`."""
    deep: tl.constexpr = min(D, 64)
    wide: tl.constexpr = min(D, 32)
    k = d // deep * (PAGE * deep) + j * deep + d % 8 // 2 * (deep // 4)
    k += d % deep // 16 * 4 + d % 16 // 8 * 2 + d % 2
    v = j // 16 * (16 * D) + d // wide * (16 * wide) + d % 8 * (2 * wide) + j % 8 // 2 * (wide // 2)
    v += d % wide // 8 * 4 + j % 16 // 8 * 2 + j % 2
    at, mask = pages + tl.where(is_k, k, v), tl.broadcast_to(mask, codes.shape)
    # In one dimension, so that the threads of a warp write to one head's few lines, not to 16 heads each.
    tl.store(tl.ravel(at), tl.ravel(codes), mask=tl.ravel(mask))


@jit(do_not_specialize=["cached"])
def qk_norm_rope_kernel(qkv, q_weight, k_weight, table, positions, q, k, v, k_pages, v_pages, k_scales,
                        v_scales, slots, cached, eps, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                        HEADS: tl.constexpr, PAGE: tl.constexpr):
    """One program: HEADS heads of one token, as a (HEADS, D/2) tile of low halves and one of high halves. One
    binary runs with a cache and without (`cached` 0), so that sums of squares have one order."""
    tiles: tl.constexpr = (H + 2 * G + HEADS - 1) // HEADS
    dtype: tl.constexpr = q.dtype.element_ty
    t = (tl.program_id(0) // tiles).to(tl.int64)
    head, i = (tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, D // 2)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + G), (head >= H + G) & (head < H + 2 * G)
    at = table + tl.load(positions + t).to(tl.int64) * D + i
    cos, sin = tl.load(at), tl.load(at + D // 2)
    wait_for_inputs()
    start_next()  # not before: attention spreads evenly only over multiprocessors that the product has left
    lo, hi, w_lo, w_hi, rstd = load_heads(qkv + (t * (H + 2 * G) + head) * D, q_weight, k_weight, eps,
                                          head < H + 2 * G, is_q, D)
    a, b = lo, hi
    if q_weight is not None:
        a, b = (a * rstd * w_lo).to(dtype).to(tl.float32), (b * rstd * w_hi).to(dtype).to(tl.float32)
    lo = tl.where(is_q | is_k, a * cos - b * sin, lo).to(dtype)
    hi = tl.where(is_q | is_k, b * cos + a * sin, hi).to(dtype)
    store_halves(q + (t * H + head) * D, lo, hi, is_q, D)
    if k_scales is not None:
        lo, hi = lo.to(tl.float32), hi.to(tl.float32)
        scale = fp8.scale_of(tl.max(tl.maximum(fp8.magnitude(lo), fp8.magnitude(hi)), 1)[:, None])
        power = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), tl.minimum(power, 128.0), scale)
        turn = tl.div_rn(1.0, scale)  # of a power of two: the products are exact, and far cheaper
        code_lo, code_hi = round_to_code(lo * turn), round_to_code(hi * turn)
        lo, hi = code_lo.to(tl.float32) * scale, code_hi.to(tl.float32) * scale
    store_halves(k + (t * G + head - H) * D, lo, hi, is_k, D)
    store_halves(v + (t * G + head - H - G) * D, lo, hi, is_v, D)
    if cached & (tl.program_id(0) % tiles * HEADS + HEADS > H):    # else all heads of the program are of q
        slot, is_kv = tl.load(slots + t), is_k | is_v
        page = slot // PAGE * (G * PAGE) + tl.where(is_k, head - H, head - H - G) * PAGE
        pages, j = tl.where(is_k, k_pages, v_pages) + page * D, slot % PAGE
        if k_scales is None:
            store_halves(pages + j * D, lo, hi, is_kv, D)
        else:
            store_codes(pages, code_lo, j, i, is_k, is_kv, D, PAGE)
            store_codes(pages, code_hi, j, D // 2 + i, is_k, is_kv, D, PAGE)
            tl.store(tl.where(is_k, k_scales, v_scales) + page + j, scale, mask=is_kv)


@jit(do_not_specialize=["T"])
def qk_norm_rope_backward_kernel(dq, dk, dv, qkv, q_weight, k_weight, table, positions, dqkv, partial, T, eps,
                                 H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
                                 TOKENS: tl.constexpr):
    """One program: HEADS heads of TOKENS tokens in turn. partial (programs, 2, D): sums for norm weights."""
    tiles: tl.constexpr = (H + 2 * G + HEADS - 1) // HEADS
    head, i = (tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, D // 2)[None, :]
    used, is_q, turned = head < H + 2 * G, head < H, head < H + G
    sum_lo, sum_hi = tl.zeros((HEADS, D // 2), tl.float32), tl.zeros((HEADS, D // 2), tl.float32)
    t = (tl.program_id(0) // tiles).to(tl.int64) * TOKENS
    for _ in range(tl.minimum(TOKENS, T - t)):
        at = dq + t * H * D + head * D + i
        a = tl.load(at, mask=is_q, other=0).to(tl.float32)
        b = tl.load(at + D // 2, mask=is_q, other=0).to(tl.float32)
        at = dk + t * G * D + (head - H) * D + i  # each head lies in one of the three: add
        a += tl.load(at, mask=turned & (head >= H), other=0).to(tl.float32)
        b += tl.load(at + D // 2, mask=turned & (head >= H), other=0).to(tl.float32)
        at = dv + t * G * D + (head - H - G) * D + i
        a += tl.load(at, mask=used & (head >= H + G), other=0).to(tl.float32)
        b += tl.load(at + D // 2, mask=used & (head >= H + G), other=0).to(tl.float32)
        at = table + tl.load(positions + t).to(tl.int64) * D + i
        cos, sin = tl.load(at), tl.load(at + D // 2)
        g_lo, g_hi = tl.where(turned, a * cos + b * sin, a), tl.where(turned, b * cos - a * sin, b)
        if q_weight is not None:
            lo, hi, w_lo, w_hi, rstd = load_heads(qkv + (t * (H + 2 * G) + head) * D, q_weight, k_weight, eps,
                                                  used, is_q, D)
            lo, hi = lo * rstd, hi * rstd
            sum_lo += g_lo * lo
            sum_hi += g_hi * hi
            w_lo, w_hi = g_lo * w_lo, g_hi * w_hi
            mean = tl.div_rn(tl.sum(w_lo * lo, 1) + tl.sum(w_hi * hi, 1), D * 1.0)[:, None]
            g_lo = tl.where(turned, rstd * (w_lo - lo * mean), g_lo)
            g_hi = tl.where(turned, rstd * (w_hi - hi * mean), g_hi)
        store_halves(dqkv + (t * (H + 2 * G) + head) * D, g_lo, g_hi, used, D)
        t += 1
    if q_weight is not None:
        at = partial + tl.program_id(0) * 2 * D + tl.arange(0, D // 2)
        is_k = turned & (head >= H)
        tl.store(at, tl.sum(tl.where(is_q, sum_lo, 0), 0))
        tl.store(at + D // 2, tl.sum(tl.where(is_q, sum_hi, 0), 0))
        tl.store(at + D, tl.sum(tl.where(is_k, sum_lo, 0), 0))
        tl.store(at + D + D // 2, tl.sum(tl.where(is_k, sum_hi, 0), 0))


def pages_and_scales(cache):
    """The four pointers of a cache that kernels take: k, v, and their scales or None twice."""
    return cache if len(cache) == 4 else (*cache, None, None)


HEADS = 16                   # of a program of the kernels above


def head_tiles(H, G, D):
    """(programs a token, warps of a program): functions of the widths alone."""
    return fp8.cdiv(H + 2 * G, HEADS), max(1, HEADS * D // 256)


def qk_norm_rope_forward(qkv, q_weight, k_weight, eps, table, positions, H, G, fp8_kv, cache, slots):
    if not use_kernels(qkv):
        return qk_norm_rope_reference(qkv, q_weight, k_weight, eps, table, positions, H, G, fp8_kv, cache,
                                      slots)
    T, D = len(qkv), qkv.shape[1] // (H + 2 * G)
    q, k, v = (qkv.new_empty(T, heads, D) for heads in (H, G, G))
    cached = int(cache is not None)
    if not cached:  # the same types, so that the same binary runs
        cache, slots = empty_cache(0, G, D, fp8_kv, k.dtype, k.device), positions.new_empty(0).long()
    tiles, warps = head_tiles(H, G, D)
    launch(qk_norm_rope_kernel, T * tiles, qkv.contiguous(), q_weight, k_weight, table, positions, q, k, v,
           *pages_and_scales(cache), slots, cached, eps, H, G, D, HEADS, PAGE, num_warps=warps, waits=True)
    return q, k, v


def qk_norm_rope_backward(dq, dk, dv, qkv, q_weight, k_weight, eps, table, positions):
    if not use_kernels(qkv):
        return qk_norm_rope_backward_reference(dq, dk, dv, qkv, q_weight, k_weight, eps, table, positions)
    (T, H, D), G, tokens, qkv = dq.shape, dk.shape[1], 16, qkv.contiguous()
    tiles, warps = head_tiles(H, G, D)
    dqkv, partial = torch.empty_like(qkv), torch.empty(fp8.cdiv(T, tokens) * tiles, 2, D, device=qkv.device)
    launch(qk_norm_rope_backward_kernel, len(partial), dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv,
           q_weight, k_weight, table, positions, dqkv, partial, T, eps, H, G, D, HEADS, tokens,
           num_warps=warps)
    return dqkv, *(partial.sum(0) if q_weight is not None else (None, None))


class QKNormRopeFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, eps, table, positions, *rest):
        weights = [w if w is None else w.data for w in (q_norm, k_norm)]
        ctx.save_for_backward(qkv, table, positions)
        ctx.weights = q_norm, k_norm, eps
        return qk_norm_rope_forward(qkv, *weights, eps, table, positions, *rest)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        """FP8 KV is straight-through: the gradient of codes * scales counts as that of what was rounded."""
        (qkv, table, positions), (q_norm, k_norm, eps) = ctx.saved_tensors, ctx.weights
        weights = [w if w is None else w.data for w in (q_norm, k_norm)]
        dqkv, *weight_grads = qk_norm_rope_backward(dq, dk, dv, qkv, *weights, eps, table, positions)
        for weight, grad in zip((q_norm, k_norm), weight_grads):
            if weight is not None:
                weight.add_grad(grad)
        return dqkv, *[None] * 10


def qk_norm_rope(qkv, q_norm, k_norm, eps, table, positions, H, G, fp8_kv=False, cache=None, slots=None):
    """qkv (T, (H+2G)*D) -> q (T,H,D), k (T,G,D), v (T,G,D), contiguous, in qkv.dtype.

    q_norm, k_norm: Weight (D,) or None; table: `rope_table`; positions (T,) int32. fp8_kv: k and v are codes
    times scales. cache: a layer's pages; k and v, or codes and scales, go there too, to slots (T,) int64.
    """
    return QKNormRopeFunction.apply(qkv, q_norm, k_norm, eps, table, positions, H, G, fp8_kv, cache, slots)


# ------------------------------------------------------------------------------------------------------------
# Attention


def read_pages_reference(cache, pages):
    """pages (n,) -> their keys and values in FP32, (n, G, PAGE, D) each: in FP8, codes * scales."""
    k, v, *scales = (x[pages].float() for x in cache)
    if not scales:
        return k, v
    places = code_places(k.shape[3], k.device)
    return [x.flatten(2)[:, :, at] * scale[..., None] for x, at, scale in zip((k, v), places, scales)]


def attend_tiles_reference(q, positions, cache, page_table, lengths):
    """The one tile that both references run: query tiles over pages, with an online softmax.

    q (N,H,R,D), row r of tile n at positions[n, r]; keys and values of tile n: page_table[n] in the pages of
    `cache`, of which lengths[n] are valid. Every product has the same shape whatever N is, and a step
    that is masked for a row leaves it as it was (factor exp(0) = 1, terms 0): so a row's bits depend on its
    own keys only. Every SPLIT keys a new softmax starts, merged in order. -> (N,H,R,D) FP32."""
    (N, H, R, D), G, dtype = q.shape, cache[0].shape[1], q.dtype
    S = H // G * R  # rows of a product: a group's heads, stacked
    fresh = lambda: (torch.full((N, G, S, 1), -torch.inf), torch.zeros(N, G, S, 1), torch.zeros(N, G, S, D))
    (top, total, out), whole = fresh(), fresh()
    q, last = q.float().reshape(N, G, S, D).contiguous(), torch.minimum(positions.amax(1), lengths - 1)
    positions = positions.repeat(1, H // G)[:, None, :, None]             # (N, 1, S, 1)
    for j in range(int(last.max()) // PAGE + 1 if N else 0):
        if j and j * PAGE % SPLIT == 0:
            whole, (top, total, out) = merge_reference(whole, (top, total, out)), fresh()
        n = (last // PAGE >= j).nonzero()[:, 0]                           # tiles that still have keys
        key = torch.arange(j * PAGE, (j + 1) * PAGE)
        valid = (key < lengths[n, None])[:, None]                         # (n, 1, PAGE)
        k, v = (torch.where(valid[..., None], x, 0).view(-1, PAGE, D)
                for x in read_pages_reference(cache, page_table[n, j].long()))
        scores = torch.bmm(q[n].view(-1, S, D), k.mT).view(-1, G, S, PAGE) * D ** -0.5
        scores = scores.masked_fill_(~((key <= positions[n]) & valid[:, :, None]), -torch.inf)
        new_top = torch.maximum(top[n], scores.amax(-1, keepdim=True))
        p, fade = (scores - new_top).exp_(), (top[n] - new_top).exp()
        total[n] = total[n] * fade + p.sum(-1, keepdim=True)
        product = torch.bmm(p.to(dtype).float().view(-1, S, PAGE), v).view(-1, G, S, D)
        out[n], top[n] = out[n] * fade + product, new_top
    _, total, out = merge_reference(whole, (top, total, out))
    return (out / total.clamp(min=1e-30)).view(N, H, R, D)                # length 0: no key, zeros


def merge_reference(whole, part):
    """Two softmaxes over different keys, (maximum, sum, sum times v) each, as one. Empty ones are neutral."""
    top = torch.maximum(whole[0], part[0])
    old, new = ((x[0] - top).exp().nan_to_num(1.0) for x in (whole, part))         # -inf - -inf: both empty
    return top, whole[1] * old + part[1] * new, whole[2] * old + part[2] * new


def attention_reference(q, k, v, packing):
    """Queries go to zero-padded tiles, keys and values to pages, as in the sampler; tiles back to tokens."""
    (_, H, D), R = q.shape, packing.rows
    start, first, length, _ = packing.tiles.long().unbind(1)
    positions = first[:, None] + torch.arange(R)                          # (N, R)
    inside = positions < length[:, None]
    row = (start[:, None] + positions)[inside]  # packed row of each used place of a tile
    tiles = q.new_zeros(len(start), R, H, D)
    tiles[inside] = q[row]
    lengths = torch.tensor(packing.lengths)
    pages_of = fp8.cdiv(lengths, PAGE)
    first_page = pages_of.cumsum(0) - pages_of
    cache = empty_cache(int(pages_of.sum()), *k.shape[1:], False, k.dtype, k.device)
    write_pages_reference((k, v), cache, (first_page * PAGE).repeat_interleave(lengths) + packing.positions)
    sequence = torch.searchsorted(lengths.cumsum(0), start.contiguous(), right=True)
    table = first_page[sequence, None] + torch.arange(int(pages_of.max()))
    out = attend_tiles_reference(tiles.transpose(1, 2), positions, cache, table, length).transpose(1, 2)
    o = torch.empty_like(q)
    o[row] = out[inside].to(q.dtype)
    return o


def paged_attention_reference(q, cache, page_table, lengths):
    """One query a sequence, put where the packed pass has it in its tile, over that sequence's pages."""
    (B, H, D), R = q.shape, 16
    lengths = lengths.long()
    place = (lengths - 1).clamp(min=0) % R
    tiles = q.new_zeros(B, R, H, D)
    tiles[torch.arange(B), place] = q
    positions = ((lengths - 1).clamp(min=0) - place)[:, None] + torch.arange(R)
    out = attend_tiles_reference(tiles.transpose(1, 2), positions, cache, page_table, lengths)
    return out[torch.arange(B), :, place].to(q.dtype)


def attention_backward_reference(do, q, k, v, packing):
    """The textbook formulas, sequence by sequence, in FP32; gradients need no equality of bits."""
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
        for out, g in ((dk, ds.mT @ qs), (dv, p.mT @ dos)):               # a group's heads share its keys
            out[rows] = g.unflatten(0, (-1, repeat)).sum(1).transpose(0, 1).to(q.dtype)
        start += length
    return dq, dk, dv


@jit
def load_tile(tiles, i):
    """Row i of Packing.tiles."""
    at = tiles + i * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@jit
def no_keys(ROWS: tl.constexpr, D: tl.constexpr):
    """Where a softmax starts, in the units of softmax_step: top, total, acc."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, D), tl.float32)


@jit
def softmax_step(scores, v, v_scale, top, total, acc, SCALE: tl.constexpr):
    """One page of keys: scores (rows, PAGE) FP32, unscaled, -inf where masked. The trainer's tile and the
    decode tile both call this. v_scale (PAGE,) or None: powers of two that the rows of v lack, or 0.

    In units of log2: top is the running maximum, total the sum of 2^(score - top), acc (rows, D) that sum
    times v. A row is summed within one warp: 16 rows for each warp have one order, fewer have others. """
    new_top = tl.maximum(top, tl.max(scores, 1) * SCALE)
    p = tl.exp2(tl.fma(scores, SCALE, -new_top[:, None]))
    fade = tl.exp2(top - new_top)  # exactly 1 where the page changed nothing, 0 at the first page
    total = tl.fma(total, fade, tl.sum(p, 1))
    p = p.to(v.dtype)
    if v_scale is not None:
        p *= v_scale[None, :]
    return new_top, total, tl.dot(p, v, acc * fade[:, None])


@jit
def merge(top, total, acc, part_top, part_total, part_acc):
    """Two softmaxes over different keys as one."""
    new_top = tl.maximum(top, part_top)
    old, new = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
    return (new_top, tl.fma(total, old, part_total * new),
            tl.fma(acc, old[:, None], part_acc * new[:, None]))


@jit(do_not_specialize=["R"])
def attention_kernel(q, k_tiles, v_tiles, tiles, o, lse, R, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                     SCALE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
                     ROWS: tl.constexpr):
    """One program: ROWS queries of one sequence and head, part of the table's TILE. k_tiles, v_tiles:
    (T, G*D), read by TMA in tiles of PAGE keys. lse (H, R) = log2 of the softmax denominator, for backward;
    its sequences are padded with +inf.

    The last page of a sequence may hold rows of the next one: keys that come later than every query, so they
    are masked as such. Heads are fastest in the grid: those that share keys run side by side and find them in
    the L2 cache.
    """
    parts: tl.constexpr = TILE // ROWS
    tile, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, first, length, padded = load_tile(tiles, tile // parts)
    first += (parts - 1 - tile % parts) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < length
    # A 64-bit base and 32-bit places in the tile: a table of 64-bit pointers would cost the registers.
    at = (start + first).to(tl.int64) * (H * D) + h * D
    place = tl.arange(0, ROWS)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    query = tl.load(q + at + place, mask=inside[:, None], other=0)
    end = tl.where(first < length, tl.minimum(first + ROWS, length), 0)    # the last part may be empty
    top, total, acc = no_keys(ROWS, D)
    for chunk in range(0, end, SPLIT):
        part_top, part_total, part_acc = no_keys(ROWS, D)
        for begin in range(chunk, tl.minimum(chunk + SPLIT, end), PAGE):
            k = k_tiles.load([start + begin, h // (H // G) * D])
            v = v_tiles.load([start + begin, h // (H // G) * D])
            scores = tl.dot(query, tl.trans(k))
            if begin + PAGE > first + 1:  # elsewhere all keys are seen, and not to look leaves the same bits
                key = begin + tl.arange(0, PAGE)
                scores = tl.where(key[None, :] <= row[:, None], scores, float("-inf"))
            part_top, part_total, part_acc = softmax_step(scores, v, None, part_top, part_total, part_acc,
                                                          SCALE)
        top, total, acc = merge(top, total, acc, part_top, part_total, part_acc)
    acc = acc * tl.div_rn(1.0, total)[:, None]
    tl.store(o + at + place, acc.to(o.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + h.to(tl.int64) * R + padded + row, tl.where(inside, top + tl.log2(total), float("inf")))


@jit
def widen(codes, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """E4M3 codes, as bytes -> `dtype`, times 2^-120: a byte's exponent and mantissa, put 4 bits further down
    under the sign, are a BF16 number too small by that (a cast would go by way of FP16 and FP32).

    is_pure=False hides from Triton that bytes lie behind the operand: it would deal it out for products of
    bytes, which does not fit the order of the codes.
    """
    if PLAIN:
        return (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 2.0 ** -120).to(dtype)
    return tl.inline_asm_elementwise("""{
        .reg .b32 low, high;
        prmt.b32 low, $2, 0, 0x9180;
        prmt.b32 high, $2, 0, 0xb3a2;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        and.b32 $0, low, 0x87f087f0;
        and.b32 $1, high, 0x87f087f0; }""", "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=False, pack=4)


@jit
def key_operand(codes, D: tl.constexpr, PAGE: tl.constexpr, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """The PAGE * D codes of k, in the order of `code_places` -> (D, PAGE), times 2^-120."""
    deep: tl.constexpr = min(D // 16, 4)
    x = tl.reshape(widen(codes, dtype, PLAIN), (D // (16 * deep), PAGE, 4, deep, 2, 2))
    return tl.reshape(tl.permute(x, (0, 3, 4, 2, 5, 1)), (D, PAGE))


@jit
def value_operand(codes, D: tl.constexpr, PAGE: tl.constexpr, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """The same for v -> (PAGE, D)."""
    wide: tl.constexpr = min(D // 8, 4)
    x = tl.reshape(widen(codes, dtype, PLAIN), (PAGE // 16, D // (8 * wide), 8, 4, wide, 2, 2))
    return tl.reshape(tl.permute(x, (0, 5, 3, 6, 1, 4, 2)), (PAGE, D))


@jit
def load_used(tiles, at, unused, D: tl.constexpr, PAGE: tl.constexpr):
    """Rows at .. at + PAGE - 1 of `page_tiles`; the last `unused` ones of every chunk are zeros, not read."""
    return tl.reshape(tiles.load([at - unused, 0, unused, 0]), (PAGE, D))


@jit(do_not_specialize=["max_pages", "B"])
def paged_attention_kernel(q, k_tiles, v_tiles, k_scales, v_scales, table, lengths, o, accs, tops, totals,
                           max_pages, B, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                           SCALE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
                           ACROSS: tl.constexpr, PLAIN: tl.constexpr):
    """One program: the newest query of one sequence, all heads of one group, padded to 16 rows, over every
    ACROSS-th part of SPLIT keys. A lone part ends in o (B, H, D), else each in sums for the kernel below.

    The number of pages comes from the device: a CUDA graph serves every length. Of the last page no more is
    read than is used: codes of v up to a multiple of 16 keys, which must be finite, as they count 0 times.
    """
    b, g, start = tl.program_id(0) // G % B, tl.program_id(0) % G, tl.program_id(0) // (B * G)
    start_next()
    wait_for_inputs()
    length, i, place = tl.load(lengths + b), tl.arange(0, 16), tl.arange(0, PAGE)
    # Keys in a row of a page's k, and keys whose codes of v share rows: see `code_places`.
    k_keys: tl.constexpr = k_tiles.block_shape[1]
    v_keys: tl.constexpr = 1 if k_scales is None else 16
    used, row, d = i < H // G, b * H + g * (H // G) + i, tl.arange(0, D)[None, :]
    query = tl.load(q + row[:, None] * D + d, mask=used[:, None], other=0)
    if k_scales is not None:
        query *= 2.0 ** 60  # half of what the codes lack, see `widen`; all of it, and q of 256 would overflow
    for part in range(start, tl.cdiv(tl.maximum(length, 1), SPLIT), ACROSS):
        top, total, acc = no_keys(16, D)
        for begin in range(part * SPLIT, tl.minimum(length, part * SPLIT + SPLIT), PAGE):
            at = (tl.load(table + b * max_pages + begin // PAGE) * G + g) * PAGE
            valid, unused = begin + place < length, PAGE - tl.minimum(length - begin, PAGE)
            k, v_scale = load_used(k_tiles, at, unused // k_keys, D, PAGE), None
            if k_scales is None:
                scores = tl.dot(query, tl.trans(k))
            else:
                k_scale = tl.load(k_scales + at + place, mask=valid, other=0) * 2.0 ** 60
                v_scale = (tl.load(v_scales + at + place, mask=valid, other=0) * 2.0 ** 120).to(query.dtype)
                scores = tl.dot(query, key_operand(k, D, PAGE, query.dtype, PLAIN)) * k_scale[None, :]
            scores = tl.where(valid[None, :], scores, float("-inf"))
            # Under way as long as k, but into registers only now: there are few.
            v = load_used(v_tiles, at, unused // v_keys * v_keys, D, PAGE)
            if k_scales is not None:
                v = value_operand(v, D, PAGE, query.dtype, PLAIN)
            top, total, acc = softmax_step(scores, v, v_scale, top, total, acc, SCALE)
        if length <= SPLIT:
            acc = acc * tl.div_rn(1.0, tl.where(length > 0, total, 1.0))[:, None]   # an idle slot: 0, not 0/0
            tl.store(o + row[:, None] * D + d, acc.to(o.dtype.element_ty), mask=used[:, None])
        else:
            at = row * PARTS + part
            tl.store(accs + at[:, None] * D + d, acc, mask=used[:, None])
            tl.store(tops + at, top, mask=used)
            tl.store(totals + at, total, mask=used)


@jit(do_not_specialize=["quads"])
def paged_merge_kernel(accs, tops, totals, lengths, o, codes, scales, quads, H: tl.constexpr, D: tl.constexpr,
                       SPLIT: tl.constexpr, PARTS: tl.constexpr, CODES_LINE: tl.constexpr):
    """One program: 128 features of one sequence, a head or more, whose parts it merges in order, as the
    trainer does. With `codes` it quantizes them, in place of storing them to o (B, H, D)."""
    HEADS: tl.constexpr = 128 // D
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    b, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    head, d = group * HEADS + tl.arange(0, HEADS), tl.arange(0, D)[None, :]
    row, used, place = b * H + head, head < H, (b * H + head[:, None]) * D + d
    start_next()
    wait_for_inputs()
    length = tl.load(lengths + b)
    if length > SPLIT:
        top, total, acc = no_keys(HEADS, D)
        for part in range(tl.cdiv(length, SPLIT)):
            at = row * PARTS + part
            part_top = tl.load(tops + at, mask=used, other=0)
            part_total = tl.load(totals + at, mask=used, other=1)
            part_acc = tl.load(accs + at[:, None] * D + d, mask=used[:, None], other=0)
            top, total, acc = merge(top, total, acc, part_top, part_total, part_acc)
        out = (acc * tl.div_rn(1.0, total)[:, None]).to(o.dtype.element_ty)
    else:
        out = tl.load(o + place, mask=used[:, None], other=0)
    if codes is None:
        tl.store(o + place, out, mask=used[:, None])
    else:
        x = tl.reshape(out, (1, 128)).to(tl.float32)
        k = group * 128 + tl.arange(0, 128)
        fp8.store_rows(x, codes, scales, quads, group, b + tl.arange(0, 1), k, b + 1, H * D, CODES_LINE)


def page_tiles(pages, chunks=1):
    """pages (P, G, PAGE, D) for TMA, as P * G * PAGE rows of which PAGE are read, in `chunks` parts.

    A step along the first axis is one row, and so is one along the third, which ends with the chunk. So
    [at - n, 0, n, 0] starts at row `at` and ends n rows early in every chunk; beyond an end TMA fills in
    zeros. The first index is never negative, as page 0 is nobody's.
    """
    rows, D = pages.numel() // pages.shape[3], pages.shape[3]
    return TensorDescriptor(pages, [rows - PAGE + 1, chunks, PAGE // chunks, D],
                            [D, PAGE // chunks * D, D, 1], [1, chunks, PAGE // chunks, D])


def tiles_of(x, rows):
    """x (T, heads, D) for TMA, which reads (rows, D) tiles of one head; what lies beyond T reads as zeros."""
    T, heads, D = x.shape
    return TensorDescriptor.from_tensor(x.view(T, heads * D), [rows, D])


def attention_forward(q, k, v, packing):
    """-> o (T, H, D), on a GPU lse (H, R). Equal bits: 64 rows x 4 warps, 128 x 8 or 4, decode's 16 x 1."""
    if not use_kernels(q):
        return attention_reference(q, k, v, packing), None
    (_, H, D), G, rows = q.shape, k.shape[1], packing.rows
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = torch.empty_like(q), torch.empty(H, len(packing.tiles) * rows, device=q.device)
    part = min(rows, 64)  # two programs fit on a multiprocessor, and fill each other's gaps
    launch(attention_kernel, len(packing.tiles) * (rows // part) * H, q, tiles_of(k, PAGE), tiles_of(v, PAGE),
           packing.tiles, o, lse, lse.shape[1], H, G, D, D ** -0.5 * LOG2E, PAGE, SPLIT, rows, part,
           num_warps=part // 16, num_stages=3)
    return o, lse


@jit(do_not_specialize=["R"])
def attention_dq_kernel(q, k_tiles, v_tiles, o, do, lse, delta, tiles, dq, R, H: tl.constexpr,
                        G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, DQ_SCALE: tl.constexpr,
                        ROWS: tl.constexpr, STEP: tl.constexpr):
    """One program: ROWS queries of one head, over their keys, STEP at a time: the forward pass's walk again.
    On the way, delta (H, R) = sum over D of do * o: what the softmax's gradient subtracts."""
    tile, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, first, length, padded = load_tile(tiles, tile)
    row = first + tl.arange(0, ROWS)
    inside = row < length
    at = (start + first).to(tl.int64) * (H * D) + h * D
    place = tl.arange(0, ROWS)[:, None] * (H * D) + tl.arange(0, D)[None, :]
    query = tl.load(q + at + place, mask=inside[:, None], other=0)
    grad = tl.load(do + at + place, mask=inside[:, None], other=0)
    out = tl.load(o + at + place, mask=inside[:, None], other=0)
    row_delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta + h.to(tl.int64) * R + padded + row, row_delta)
    row_lse = tl.load(lse + h.to(tl.int64) * R + padded + row)
    acc = tl.zeros((ROWS, D), tl.float32)
    for begin in range(0, tl.minimum(first + ROWS, length), STEP):
        k = k_tiles.load([start + begin, h // (H // G) * D])
        v = v_tiles.load([start + begin, h // (H // G) * D])
        p = tl.exp2(tl.fma(tl.dot(query, tl.trans(k)), SCALE, -row_lse[:, None]))
        if begin + STEP > first + 1:
            key = begin + tl.arange(0, STEP)
            p = tl.where(key[None, :] <= row[:, None], p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v)) - row_delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc)
    tl.store(dq + at + place, (acc * DQ_SCALE).to(dq.dtype.element_ty), mask=inside[:, None])


@jit(do_not_specialize=["R"])
def attention_dkv_kernel(q_tiles, k_tiles, v_tiles, do_tiles, lse, delta, tiles, dk, dv, R, H: tl.constexpr,
                         G: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, DK_SCALE: tl.constexpr,
                         ROWS: tl.constexpr, STEP: tl.constexpr):
    """One program: STEP keys of one group. It walks the group's heads and their queries, STEP at a time, in
    ascending order, and alone writes dk and dv: no atomics, one order. Everything is held transposed,
    (keys, queries). lse, delta: (H * R,), by TMA; +inf makes p = 0 where a sequence is padded."""
    g, part = tl.program_id(0) % G, tl.program_id(0) // G % (ROWS // STEP)
    start, first, length, padded = load_tile(tiles, tl.program_id(0) // (G * (ROWS // STEP)))
    # Early keys are seen by the most queries: mirror the table, whose longest query tiles come first.
    first = tl.cdiv(length, ROWS) * ROWS - ROWS - first + part * STEP
    k = k_tiles.load([start + first, g * D])
    v = v_tiles.load([start + first, g * D])
    i = tl.arange(0, STEP)
    dk_acc, dv_acc = tl.zeros((STEP, D), tl.float32), tl.zeros((STEP, D), tl.float32)
    begin, h = first, g * (H // G)
    for _ in range(tl.cdiv(length - first, STEP) * (H // G)):
        q = q_tiles.load([start + begin, h * D])
        do = do_tiles.load([start + begin, h * D])
        row_lse = lse.load([h * R + padded + begin])
        row_delta = delta.load([h * R + padded + begin])
        p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q)), SCALE, -row_lse[None, :]))
        p = tl.where((i[:, None] <= i[None, :]) | (begin > first), p, 0.0)
        dv_acc = tl.dot(p.to(do.dtype), do, dv_acc)
        ds = p * (tl.dot(v, tl.trans(do)) - row_delta[None, :])
        dk_acc = tl.dot(ds.to(q.dtype), q, dk_acc)
        begin += STEP
        h += (begin >= length).to(tl.int32)                               # the next head starts over
        begin = tl.where(begin >= length, first, begin)
    at = (start + first + i).to(tl.int64)[:, None] * (G * D) + g * D + tl.arange(0, D)[None, :]
    valid = (first + i < length)[:, None]
    tl.store(dk + at, (dk_acc * DK_SCALE).to(dk.dtype.element_ty), mask=valid)
    tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=valid)


def attention_backward(do, q, k, v, o, lse, packing):
    if not use_kernels(q):
        return attention_backward_reference(do, q, k, v, packing)
    (_, H, D), G, rows, tiles = q.shape, k.shape[1], packing.rows, packing.tiles
    q, k, v, delta = q.contiguous(), k.contiguous(), v.contiguous(), torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scales, step = (D ** -0.5 * LOG2E, D ** -0.5), min(rows, 64)
    k_tiles, v_tiles = tiles_of(k, step), tiles_of(v, step)
    launch(attention_dq_kernel, len(tiles) * H, q, k_tiles, v_tiles, o, do, lse, delta, tiles, dq,
           lse.shape[1], H, G, D, *scales, rows, step, num_warps=rows // 16, num_stages=3)
    # At head size 128 the sums and two products take all 255 registers of a thread: some bookkeeping spills.
    lines = [TensorDescriptor.from_tensor(x.view(-1), [step]) for x in (lse, delta)]
    launch(attention_dkv_kernel, len(tiles) * (rows // step) * G, tiles_of(q, step), k_tiles, v_tiles,
           tiles_of(do, step), *lines, tiles, dk, dv, lse.shape[1], H, G, D, *scales, rows, step,
           num_warps=step // 16, num_stages=2 if D > 64 else 3)
    return dq, dk, dv


class AttentionFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, packing):
        o, lse = attention_forward(q, k, v, packing)
        ctx.packing = packing
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        return *attention_backward(do.contiguous(), *ctx.saved_tensors, ctx.packing), None


def attention(q, k, v, packing):
    """Causal attention of packed sequences: q (T,H,D), k, v (T,G,D) -> (T,H,D); head h reads group hG//H."""
    return AttentionFunction.apply(q, k, v, packing) if len(q) else torch.empty_like(q)


def paged_attention(q, cache, page_table, lengths, quantize=False):
    """One new token a sequence: q (B,H,D) over the pages page_table (B, max) int32 of `cache` -> (B, H*D), or
    its row-wise (codes, scales) when `quantize`.

    lengths (B,) int32 count the new token, whose k and v are already in place; length 0 gives zeros. Page 0
    is no sequence's. The bits equal the token's row in `attention`."""
    if not use_kernels(q):
        o = paged_attention_reference(q, cache, page_table, lengths).flatten(1)
        return fp8.quantize_rows(o) if quantize else o
    (B, H, D), G = q.shape, cache[0].shape[1]
    k_pages, v_pages, k_scales, v_scales = pages_and_scales(cache)
    if k_scales is not None:
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    tiles = page_tiles(k_pages, 1 if k_scales is None or D < 64 else D // 64), page_tiles(v_pages)
    o, parts = torch.empty_like(q), fp8.cdiv(page_table.shape[1] * PAGE, SPLIT)
    accs = torch.empty(B, H, parts, D, device=q.device)
    tops, totals = torch.empty(2, B, H, parts, device=q.device)
    codes, scales = fp8.row_outputs(o.flatten(1)) if quantize else (None, None)
    if B:
        # A part that a short sequence does not have costs a program's start. 512 keep an H200 busy.
        across = min(parts, max(1, 512 // (B * G)))
        # With 5 stages a program has two pages under way, with 3 one, and more programs fit on a
        # multiprocessor: better where there are more of them than 512 of FP8 or 256 of BF16 (D = 128).
        stages = 5 if B * G * across * k_pages[0, 0].nbytes <= 2 ** 22 else 3
        launch(paged_attention_kernel, B * G * across, q.contiguous(), *tiles, k_scales, v_scales, page_table,
               lengths, o, accs, tops, totals, page_table.stride(0), B, H, G, D, D ** -0.5 * LOG2E, PAGE,
               SPLIT, parts, across, fp8.INTERPRET or torch.version.hip is not None, num_warps=1,
               num_stages=stages, waits=True)
        if parts > 1 or quantize:
            launch(paged_merge_kernel, B * fp8.cdiv(H * D, 128), accs, tops, totals, lengths, o, codes,
                   scales, fp8.cdiv(B, 4), H, D, SPLIT, parts, fp8.round_up(H * D, 16), num_warps=1,
                   waits=True)
    return (codes, scales) if quantize else o.flatten(1)


# ------------------------------------------------------------------------------------------------------------
# Head: log-probabilities of given tokens, and of sampled ones, by the same code


def gumbel_reference(bits):
    """Gumbel noise of 32 random bits. The maximum is decided where the exponential e is small, so the bits'
    fine end (steps of 2^-32 near 0) is put there; u stays inside (0,1), hence the noise inside (-3, 23)."""
    u = ((bits.float() + 0.5) * 2.0 ** -32).clamp(max=1 - 2.0 ** -24)
    # -log(1 - u) loses its digits near u = 0; five terms of the series are exact to FP32 below 1/64.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return -torch.where(u < 1 / 64, series, -(1 - u).log()).log()


def head_reference(hidden, w, inv_temp, targets=None, noise=None, seed=None, keys=None, positions=None):
    """logits = (hidden w^T) * inv_temp in FP32; softmax by tiles of VTILE columns, in order.

    Scores `targets`, or draws them by the Gumbel-max trick, twice: a tile, which weighs what its tokens weigh
    together, then a token of it. That is 594 + 256 draws instead of 151,936, from the same distribution.
    noise 0 takes the largest logit (ties: the lowest id).
    -> tokens (T,) int64, logprobs (T,) FP32, lse (T,) FP32
    """
    V = len(w)
    x = matmul_rows(hidden, w) * inv_temp
    tiles = F.pad(x, (0, -V % VTILE), value=-torch.inf).unflatten(1, (-1, VTILE))
    tile_top = tiles.amax(-1)
    tile_sum = (tiles - tile_top[:, :, None]).exp().sum(-1)
    top = tile_top.amax(-1)
    log_sum = (tile_sum * (tile_top - top[:, None]).exp()).sum(-1).log()
    if targets is None:
        name = positions[:, None].long(), keys[:, None] & 0xFFFFFFFF, (keys[:, None] >> 32) & 0xFFFFFFFF
        gumbel = lambda ids: noise * gumbel_reference(fp8.philox_reference(seed, ids, *name)[0])
        # Tiles draw under ids beyond the vocabulary's. argmax takes the first of equal values.
        tile = (tile_top + noise * tile_sum.log() + gumbel(V + torch.arange(tiles.shape[1]))).argmax(-1)
        ids = tile[:, None] * VTILE + torch.arange(VTILE)
        best = (tiles[torch.arange(len(x)), tile] + gumbel(ids)).argmax(-1)
        targets = ids.gather(1, best[:, None])[:, 0]
    picked = x.gather(1, targets[:, None])[:, 0]
    return targets, picked - top - log_sum, top + log_sum


@jit
def gumbel(seed, ids, position, key):
    """Gumbel noise of (seed, position, key) and ids (N,) int32; `gumbel_reference` says why this form."""
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32 & 0xFFFFFFFF).to(tl.uint32)
    bits = tl.philox(seed, ids, position, low, high)[0]
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0 ** -32, 1 - 2.0 ** -24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return -tl.log(tl.where(u < 1 / 64, series, -tl.log(1 - u)))


@jit
def logits_tile(index, x, w, inv_temp, T, V: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
                VTILE: tl.constexpr, STEP: tl.constexpr):
    """-> FP32 logits (ROWS, VTILE) of a tile, -inf beyond the vocabulary; its place in the vocabulary, its
    tokens and ids.

    C is walked in ascending steps into one accumulator, whatever ROWS is. Token tiles come fastest: a tile of
    w, by far the largest operand, is read from memory once. x (T,C) and w (V,C) are tensor descriptors: the
    copy engine reads zeros past their ends.
    """
    tile, first = index // tl.cdiv(T, ROWS), index % tl.cdiv(T, ROWS) * ROWS
    row, col = first + tl.arange(0, ROWS), tile * VTILE + tl.arange(0, VTILE)
    acc = tl.zeros((ROWS, VTILE), tl.float32)
    for c in range(0, C, STEP):
        acc = tl.dot(x.load([first, c]), w.load([tile * VTILE, c]).T, acc)
    return tl.where((col < V)[None, :], acc * tl.load(inv_temp), float("-inf")), tile, row, col


@jit
def store_columns(rows, first, x, used):
    """Stores x (rows, columns) at columns first, first + 1, .. of `rows` (pointers), 64 at a time: a store
    sorts its values in shared memory, of which the loads of the next tile leave little."""
    columns: tl.constexpr = x.shape[1]
    if columns > 64:
        left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, columns // 2)), (0, 2, 1)))
        store_columns(rows, first, left, used)
        store_columns(rows, first + columns // 2, right, used)
    else:
        tl.store(rows[:, None] + first + tl.arange(0, columns), x, mask=used[:, None])


@jit(do_not_specialize=["T"])
def head_kernel(x, w, inv_temp, targets, tops, sums, picked, T, V: tl.constexpr, C: tl.constexpr,
                TILES: tl.constexpr, ROWS: tl.constexpr, VTILE: tl.constexpr, STEP: tl.constexpr):
    """Tiles of logits, reduced at once to maxima and sums of exponentials, (T, TILES) each. A program takes
    one tile after another, and loads the next one while it reduces (flatten).

    picked (T,): the logits of the targets; without targets (T, TILES * VTILE): all logits, of which the
    merge below looks at one tile.
    """
    start_next()
    wait_for_inputs()
    for index in tl.range(tl.program_id(0), tl.cdiv(T, ROWS) * TILES, tl.num_programs(0), flatten=True):
        logits, tile, row, _ = logits_tile(index, x, w, inv_temp, T, V, C, ROWS, VTILE, STEP)
        row64, used = row.to(tl.int64), row < T
        top = tl.max(logits, 1)
        tl.store(tops + row64 * TILES + tile, top, mask=used)
        tl.store(sums + row64 * TILES + tile, tl.sum(tl.exp(logits - top[:, None]), 1), mask=used)
        if targets is None:
            store_columns(picked + row64 * (TILES * VTILE), tile * VTILE, logits, used)
        else:
            target = tl.load(targets + row, mask=used, other=-1)
            # One term of the sum is not 0: exact. Places in the tile are constants; ids would need registers.
            here = tl.arange(0, VTILE)[None, :] == (target - tile * VTILE)[:, None]
            logit = tl.sum(tl.where(here, logits, 0.0), 1)
            tl.store(picked + row, logit, mask=used & (target // VTILE == tile))


@jit
def head_merge_kernel(tops, sums, picked, noise, seed, keys, positions, tokens, logprobs, lse,
                      V: tl.constexpr, TILES: tl.constexpr, VTILE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: one token. Merges its TILES partials, in an order that TILES alone decides. With `noise`
    it draws the token: a tile, then an id in it; the torch reference above says how."""
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start_next()
    wait_for_inputs()
    top_of = tl.load(tops + t * TILES + i, mask=i < TILES, other=float("-inf"))
    sum_of = tl.load(sums + t * TILES + i, mask=i < TILES, other=1)                        # times exp(-inf)
    top = tl.max(top_of, 0)
    log_sum = tl.log(tl.sum(sum_of * tl.exp(top_of - top), 0))
    if noise is None:
        logit = tl.load(picked + t)
    else:
        noise, seed, key, position = tl.load(noise), tl.load(seed), tl.load(keys + t), tl.load(positions + t)
        score = tl.fma(noise, tl.log(sum_of) + gumbel(seed, V + i, position, key), top_of)
        tile = tl.min(tl.where(score == tl.max(score, 0), i, TILES - 1), 0)                # ties: the lowest
        ids = tile * VTILE + tl.arange(0, VTILE)
        logits = tl.load(picked + t * (TILES * VTILE) + ids)
        score = tl.fma(noise, gumbel(seed, ids, position, key), logits)
        token = tl.min(tl.where(score == tl.max(score, 0), ids, V - 1), 0)
        tl.store(tokens + t, token.to(tl.int64))
        logit = tl.sum(tl.where(ids == token, logits, 0.0), 0)
    tl.store(logprobs + t, logit - top - log_sum)
    tl.store(lse + t, top + log_sum)


def launch_head(kernel, x, w, *args, **options):
    """Runs one of the kernels that loop over `logits_tile` over all of x (T,C) and w (V,C)."""
    # 16 rows a warp, so that a row's sum lies within a warp: measured to give equal bits.
    (T, C), V, tiles, step = x.shape, len(w), fp8.cdiv(len(w), VTILE), 64
    rows, describe = 64 if T <= 64 else 128, TensorDescriptor.from_tensor
    count, processors = fp8.cdiv(T, rows) * tiles, fp8.multiprocessors(x.device)
    # Four stages leave 32 KB of a Hopper's shared memory to `store_columns`; other GPUs may have less.
    launch(kernel, min(count, processors or count), describe(x, [rows, step]), describe(w, [VTILE, step]),
           *args, T, V, C, tiles, rows, VTILE, step, num_warps=rows // 16, num_stages=4 if processors else 2,
           **options)


def head_forward(hidden, w, inv_temp, targets=None, noise=None, seed=None, keys=None, positions=None):
    """As head_reference. Tokens go in chunks: the partials of 4096 tokens at V = 151,936 are 2 x 10 MB."""
    if not use_kernels(hidden):
        return head_reference(hidden, w, inv_temp, targets, noise, seed, keys, positions)
    T, V, drawing = len(hidden), len(w), targets is None
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=hidden.device)
    tokens = new(T, dtype=torch.int64) if drawing else targets.contiguous()
    tiles, hidden, logprobs, lse = fp8.cdiv(V, VTILE), hidden.contiguous(), new(T), new(T)
    for i in range(0, T, 4096):
        part, n = slice(i, i + 4096), min(4096, T - i)
        tops, sums = new(n, tiles), new(n, tiles)
        # NaN stays where no program owns the target: an id outside the vocabulary shows.
        picked = new(n, tiles * VTILE) if drawing else new(n).fill_(torch.nan)
        target = None if drawing else tokens[part]
        name = (seed, keys[part], positions[part]) if drawing else (None,) * 3
        launch_head(head_kernel, hidden[part], w, inv_temp, target, tops, sums, picked, waits=True)
        launch(head_merge_kernel, n, tops, sums, picked, noise, *name, tokens[part], logprobs[part],
               lse[part], V, tiles, VTILE, triton.next_power_of_2(tiles), num_warps=4, waits=True)
    return tokens, logprobs, lse


def dlogits_reference(hidden, w, inv_temp, targets, lse, grad):
    return ((F.one_hot(targets, len(w)) - (hidden.float() @ w.float().t() * inv_temp - lse[:, None]).exp())
            * (grad[:, None] * inv_temp)).to(hidden.dtype)


@jit(do_not_specialize=["T"])
def dlogits_kernel(x, w, inv_temp, targets, lse, grad, out, T, V: tl.constexpr, C: tl.constexpr,
                   TILES: tl.constexpr, ROWS: tl.constexpr, VTILE: tl.constexpr, STEP: tl.constexpr):
    """Tiles of logits once more, and in their place the gradient, which alone is stored."""
    for index in range(tl.program_id(0), tl.cdiv(T, ROWS) * TILES, tl.num_programs(0)):
        logits, tile, row, col = logits_tile(index, x, w, inv_temp, T, V, C, ROWS, VTILE, STEP)
        used = row < T
        log_sum = tl.load(lse + row, mask=used, other=0)
        scale = tl.load(grad + row, mask=used, other=0) * tl.load(inv_temp)
        target = tl.load(targets + row, mask=used, other=-1)
        onehot = (col[None, :] == target[:, None]).to(tl.float32)       # the store below needs `col` anyway
        dlogits = (onehot - tl.exp(logits - log_sum[:, None])) * scale[:, None]
        at = out + row.to(tl.int64)[:, None] * V + col[None, :]
        tl.store(at, dlogits.to(out.dtype.element_ty), mask=used[:, None] & (col < V)[None, :])


def dlogits(hidden, w, inv_temp, targets, lse, grad):
    """d loss / d(hidden w^T), (T,V) in hidden.dtype: (onehot - softmax) * grad / temperature."""
    if not use_kernels(hidden):
        return dlogits_reference(hidden, w, inv_temp, targets, lse, grad)
    out = torch.empty(len(hidden), len(w), dtype=hidden.dtype, device=hidden.device)
    launch_head(dlogits_kernel, hidden, w, inv_temp, targets, lse, grad, out)
    return out


class TokenLogprobsFunction(torch.autograd.Function):
    CHUNK = 2048  # tokens whose gradient of logits exists at once: 0.6 GB of BF16 at V = 151,936

    @staticmethod
    def forward(ctx, hidden, head, targets, inv_temp):
        _, logprobs, lse = head_forward(hidden, head.data, inv_temp, targets)
        ctx.head = head
        ctx.save_for_backward(hidden, targets, inv_temp, lse)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        (hidden, targets, inv_temp, lse), w = ctx.saved_tensors, ctx.head.data
        hidden, targets, grad = hidden.contiguous(), targets.contiguous(), grad.contiguous()
        dhidden = torch.empty_like(hidden)
        for i in range(0, len(hidden), TokenLogprobsFunction.CHUNK):
            rows = slice(i, i + TokenLogprobsFunction.CHUNK)
            d = dlogits(hidden[rows], w, inv_temp, targets[rows], lse[rows], grad[rows])
            dhidden[rows] = torch.mm(d, w, out_dtype=torch.float32) if d.is_cuda else d.float() @ w.float()
            fp8.add_product(ctx.head.gradient(), d.t(), hidden[rows])
        return dhidden, None, None, None


def token_logprobs(hidden, head, targets, inv_temp):
    """log softmax(hidden head^T * inv_temp)[targets]: hidden (T,C), head Weight (V,C), targets (T,) int64 ->
    FP32 (T,). inv_temp: FP32 (1,) on the device, 1/temperature made on the host: a product is rounded once on
    every machine."""
    return TokenLogprobsFunction.apply(hidden, head, targets, inv_temp)


@torch.no_grad()
def sample(hidden, head, inv_temp, noise, seed, keys, positions):
    """Next tokens and their log-probabilities, with the bits of `token_logprobs`: -> (B,) int64, (B,) FP32.

    hidden (B,C); noise (1,) FP32: 1, or 0 for the most likely token. Seed (1,) int64, keys (B,) int64, which
    name the sequence, positions (B,) int32 and vocabulary ids alone decide the noise."""
    return head_forward(hidden, head.data, inv_temp, None, noise, seed, keys, positions)[:2]


# ------------------------------------------------------------------------------------------------------------
# Embedding


def embed_backward_reference(dx, tokens, grad):
    """grad[tokens[t]] += dx[t] in FP32, t ascending (on a GPU index_add_ has no fixed order)."""
    grad.index_add_(0, tokens, dx.float())


@jit(do_not_specialize=["T"])
def embed_backward_kernel(dx, sorted_ids, order, grad, T,
                          C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """If sorted place i is the first of its token id: BLOCK columns of that id's whole sum. The sort is
    stable: an id's rows come in token order, ROWS at a time, and each row of grad has one writer."""
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    i, col = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(sorted_ids + i)
    first = token != tl.load(sorted_ids + i - 1, mask=i > 0, other=-1)
    total, more, begin = tl.zeros((BLOCK,), tl.float32), first, i
    while more:
        row = begin + tl.arange(0, ROWS)
        same = tl.load(sorted_ids + row, mask=row < T, other=-1) == token
        source = tl.load(order + row, mask=same, other=0)
        mask = same[:, None] & (col < C)[None, :]
        rows = tl.load(dx + source[:, None] * C + col[None, :], mask=mask, other=0)
        total += tl.sum(rows.to(tl.float32), 0)
        begin += ROWS
        more = tl.load(sorted_ids + begin, mask=begin < T, other=-1) == token
    at, mask = grad + token * C + col, tl.where(first, col, C) < C
    tl.store(at, tl.load(at, mask=mask, other=0) + total, mask=mask)


def embed_backward(dx, tokens, grad):
    if not use_kernels(dx):
        return embed_backward_reference(dx, tokens, grad)
    (T, C), (ids, order) = dx.shape, tokens.sort(stable=True)
    launch(embed_backward_kernel, T * fp8.cdiv(C, 512), dx, ids, order, grad, T, C, 512, 16, num_warps=4)


class EmbedFunction(torch.autograd.Function):

    @staticmethod
    def forward(ctx, data, tokens, w):
        ctx.w = w
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, data)

    @staticmethod
    def backward(ctx, dx):
        embed_backward(dx.contiguous(), *ctx.saved_tensors, ctx.w.gradient())
        return None, None, None


def embed(tokens, w):
    """Rows of w: tokens (T,) int64, w Weight (V,C) -> (T,C)."""
    # The graph starts here: torch records an operation only if one of its inputs requires grad.
    return EmbedFunction.apply(w.data.detach().requires_grad_(), tokens, w)
