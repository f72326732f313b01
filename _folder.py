import dataclasses
import datetime
import itertools
import json
import math
import os
import re
import unicodedata
from pathlib import Path

import jinja2
import jinja2.sandbox
import safetensors
import safetensors.torch
import tiktoken
import torch

# ======================================================================================================
# Checkpoint folders: config.json, weights, tokenizer, chat template
#
# A folder is what Hugging Face tools read and write. Three rules hold for everything below:
#   - Whatever would change the result and is not computed here is refused, with file, field and value.
#     A field that is ignored in silence gives a model that looks right on short prompts.
#   - Faults are found before a weight is read: headers are checked first, tensors are read after that.
#   - Nothing is fetched, except by `folder_from_name` when it is given the name of a repository.
# ======================================================================================================


def _read_json(path):
    """The object in a JSON file (UTF-8, a byte-order mark is skipped). ValueError names the file and what is wrong."""
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: a checkpoint folder needs it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again")
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _write_atomic(path, write):
    """Calls `write(temporary path)` and renames the result to `path`: a killed run leaves the old file or the new one."""
    temporary = Path(f"{path}.tmp{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)       # only there when `write` failed


def _write_json(path, value):
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    _write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def folder_from_name(name):
    """An existing folder is returned as it is; "Org/Model" is downloaded into the Hugging Face cache.

    FileNotFoundError says how to get the files when there is no such folder, or no huggingface_hub to fetch them.
    """
    if os.path.isdir(name):
        return str(name)
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file: give the folder that holds config.json and model.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"no folder {name}: give a checkpoint folder, or a name such as Qwen/Qwen3-0.6B")
    local = name.split("/")[1]
    commands = f"pip install huggingface_hub && hf download {name} --local-dir {local}, then use {local}"
    try:
        import huggingface_hub
    except ImportError:
        raise FileNotFoundError(f"no folder {name}, and huggingface_hub is not installed to download it:\n{commands}")
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"no folder {name}, and its download failed ({reason}).\nBy hand: {commands}")


# ------------------------------------------------------------------------------------------------------
# Config
# ------------------------------------------------------------------------------------------------------

# The three families are one transformer with two switches: Qwen2 (and 2.5) has biases on q, k and v, Qwen3
# normalizes each head of q and k, Llama 3 has neither. config.json says so by model_type alone.
FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Fields that change the result, with the values under which they do nothing. `null` or absence is fine too.
INERT = {
    "hidden_act": ["silu"], "use_sliding_window": [False], "mlp_bias": [False], "attention_dropout": [0],
    "pretraining_tp": [1], "partial_rotary_factor": [1], "rotary_pct": [1], "quantization_config": [{}],
    "compression_config": [{}], "num_experts": [0], "num_local_experts": [0], "n_routed_experts": [0],
    "moe_intermediate_size": [0], "text_config": [], "is_encoder_decoder": [False],
}


def _number(raw, name, where, kind=int, default=None):
    """raw[name] as a positive, finite int or float. `default` stands in for null and absence."""
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
    rope_scaling: dict | None = None                # None, or the four numbers of Llama 3.1 and "rope_type": "llama3"
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

    @property
    def qkv_bias(self):
        return self.model_type == "qwen2"

    @property
    def qk_norm(self):
        return self.model_type == "qwen3"

    @classmethod
    def from_folder(cls, folder):
        """Reads config.json (and the EOS ids of its two neighbours). ValueError names the file, field and value
        of anything that this implementation does not compute."""
        where = Path(folder, "config.json")
        raw = _read_json(where)
        kind = raw.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(f"{where}: model_type {kind!r} is not supported, only dense {', '.join(FAMILIES)}")
        _refuse(raw, kind, where)
        theta, scaling = _read_rope(raw, where)
        heads = _number(raw, "num_attention_heads", where)
        hidden = _number(raw, "hidden_size", where)
        # Defaults only where Hugging Face's family default is beyond doubt; Qwen3's head size is 128 whatever the width.
        head_dim = 128 if kind == "qwen3" else hidden // heads
        tied = raw.get("tie_word_embeddings")
        if tied not in (None, True, False):
            raise ValueError(f"{where}: tie_word_embeddings is {tied!r}, expected true or false")
        sizes = ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        try:
            return cls(**{name: _number(raw, name, where) for name in sizes}, model_type=kind, hidden_size=hidden,
                       num_attention_heads=heads, head_dim=_number(raw, "head_dim", where, default=head_dim),
                       num_key_value_heads=_number(raw, "num_key_value_heads", where,
                                                   default=heads if kind == "llama" else None),
                       rms_norm_eps=_number(raw, "rms_norm_eps", where, float), rope_theta=theta,
                       rope_scaling=scaling, tie_word_embeddings=bool(tied), eos_token_id=read_eos_ids(folder))
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if str(where) not in str(error) else str(error))

    def to_dict(self):
        """The content of config.json. Rotary settings go to their older place, which old and new readers know."""
        out = {"architectures": [FAMILIES[self.model_type]], **dataclasses.asdict(self)}
        eos = list(self.eos_token_id)
        out["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        out["bos_token_id"] = None                  # left out, transformers would fill in the 1 of Llama 2
        return out | {"hidden_act": "silu", "torch_dtype": "bfloat16"}

    def inv_freq(self):
        """Rotary frequencies in radians per position, FP32 (D/2,), in the operations of transformers: same bits."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        freq = 1.0 / (self.rope_theta ** exponent)
        if self.rope_scaling is None:
            return freq
        # Llama 3.1: wavelengths beyond the original context are stretched by `factor`, those well within it stay,
        # and between the two limits the factor is blended in.
        s = self.rope_scaling
        low, high, length = s["low_freq_factor"], s["high_freq_factor"], s["original_max_position_embeddings"]
        wavelength = 2 * math.pi / freq
        smooth = (length / wavelength - low) / (high - low)
        blended = (1 - smooth) * freq / s["factor"] + smooth * freq
        kept = torch.where(wavelength < length / high, freq, blended)
        return torch.where(wavelength > length / low, freq / s["factor"], kept)


def _refuse(raw, kind, where):
    """Raises ValueError for the first field of config.json that asks for something else than what is computed."""
    for name, allowed in INERT.items():
        value = raw.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{where}: {name} = {json.dumps(value)[:200]} is not supported")
    # Qwen2 has its biases whatever this field says; for the others it adds one to the output projection as well.
    if kind != "qwen2" and raw.get("attention_bias") not in (None, False):
        raise ValueError(f"{where}: attention_bias = {json.dumps(raw['attention_bias'])} is not supported for {kind}")
    layers = raw.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(t != "full_attention" for t in layers)):
        other = next((t for t in layers if t != "full_attention"), layers) if isinstance(layers, list) else layers
        raise ValueError(f"{where}: layer_types has {other!r}, only full_attention is supported")


def _read_rope(raw, where):
    """(theta, scaling or None) from `rope_theta` and `rope_scaling`, or from `rope_parameters`, where transformers 5
    keeps both. Two different values, or none, are an error: a wrong base shows only on long prompts."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise ValueError(f"{where}: {name} = {json.dumps(value)[:200]} is not supported, expected one flat object")
    both = {**old, **new}
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ValueError(f"{where}: {name} is {old[name]!r} in rope_scaling and {new[name]!r} in rope_parameters")
    if raw.get("rope_theta") is not None and both.setdefault("rope_theta", raw["rope_theta"]) != raw["rope_theta"]:
        raise ValueError(f"{where}: rope_theta is {raw['rope_theta']!r}, but {both['rope_theta']!r} "
                         f"where it is nested: keep the right one")
    if both.get("rope_theta") is None:
        raise ValueError(f"{where}: no rope_theta, neither at the top nor in rope_parameters: add the model's value")
    theta = _number(both, "rope_theta", where, float)
    kinds = [both[name] for name in ("rope_type", "type") if both.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ValueError(f"{where}: rope_type is {kinds[0]!r} but type is {kinds[1]!r}: keep the right one")
    rest = both.keys() - {"rope_theta", "rope_type", "type"}
    if both.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"{where}: partial_rotary_factor = {both['partial_rotary_factor']!r} is not supported")
    rest -= {"partial_rotary_factor"}
    if not kinds and rest or "mrope_section" in rest:
        raise ValueError(f"{where}: rotary settings {sorted(rest)} without a supported rope_type")
    if not kinds or kinds[0] == "default":
        return theta, None
    if kinds[0] != "llama3":
        raise ValueError(f"{where}: rope_type = {kinds[0]!r} is not supported, only default and llama3")
    scaling = {"rope_type": "llama3"}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        scaling[name] = _number(both, name, where, float)
    scaling["original_max_position_embeddings"] = _number(both, "original_max_position_embeddings", where)
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError(f"{where}: low_freq_factor {scaling['low_freq_factor']} is not below "
                         f"high_freq_factor {scaling['high_freq_factor']}")
    return theta, scaling


def read_eos_ids(folder):
    """Sorted union of the EOS ids in generation_config.json, config.json and tokenizer_config.json.

    The three disagree in public checkpoints (a base model's document token, an instruct model's turn token), and a
    sampler that knows only one of them runs on past the end. Empty when no file names one: then nothing but the
    length limit stops a completion.
    """
    folder, ids = Path(folder), set()
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _read_json(path).get("eos_token_id") if path.exists() else None
        for i in value if isinstance(value, list) else [value]:
            if i is None:
                continue
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise ValueError(f"{path}: eos_token_id {value!r} holds something that is no token id")
            ids.add(i)
    path = folder / "tokenizer_config.json"
    token = _token_text(_read_json(path).get("eos_token")) if path.exists() else None
    if token is not None and (folder / "tokenizer.json").exists():
        raw = _read_json(folder / "tokenizer.json")
        known = {t["content"]: t["id"] for t in raw.get("added_tokens") or []}
        known = raw.get("model", {}).get("vocab", {}) | known
        if token not in known:
            raise ValueError(f"{path}: eos_token {token!r} is not in tokenizer.json")
        ids.add(known[token])
    return sorted(ids)


def _token_text(token):
    """tokenizer_config.json spells a token as a string or as {"content": string, ...}."""
    return token.get("content") if isinstance(token, dict) else token


# ------------------------------------------------------------------------------------------------------
# Weights
# ------------------------------------------------------------------------------------------------------

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def tensor_map(config):
    """{our name: [(Hugging Face name, shape), ...]}: the one place that fuses and splits. The parts of a fused matrix
    lie one after the other along its rows (the first axis)."""
    C, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    parts = {"embedding": [("model.embed_tokens.weight", (config.vocab_size, C))]}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, mlp = theirs + "self_attn.", theirs + "mlp."
        rows = zip("qkv", (q, kv, kv))
        parts[ours + "input_norm"] = [(theirs + "input_layernorm.weight", (C,))]
        parts[ours + "qkv"] = [(f"{attn}{x}_proj.weight", (n, C)) for x, n in zip("qkv", (q, kv, kv))]
        if config.qkv_bias:
            parts[ours + "qkv_bias"] = [(f"{attn}{x}_proj.bias", (n,)) for x, n in rows]
        if config.qk_norm:
            parts[ours + "q_norm"] = [(attn + "q_norm.weight", (D,))]
            parts[ours + "k_norm"] = [(attn + "k_norm.weight", (D,))]
        parts[ours + "o"] = [(attn + "o_proj.weight", (C, q))]
        parts[ours + "post_norm"] = [(theirs + "post_attention_layernorm.weight", (C,))]
        parts[ours + "gate_up"] = [(f"{mlp}{x}_proj.weight", (F, C)) for x in ("gate", "up")]
        parts[ours + "down"] = [(mlp + "down_proj.weight", (C, F))]
    parts["norm"] = [("model.norm.weight", (C,))]
    if not config.tie_word_embeddings:
        parts["head"] = [("lm_head.weight", (config.vocab_size, C))]
    return parts


def _open_safetensors(path):
    """A safetensors handle, after the checks whose messages would otherwise be cryptic."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: download it again, or give another folder")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ValueError(f"{path} is a Git LFS pointer of {size} bytes, not weights: run `git lfs pull` there")
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is cut off or no safetensors file ({size} bytes, its header would take "
                             f"{length}): download it again")
        try:
            header = json.loads(file.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} has a damaged header ({type(error).__name__}: {error}): download it again")
    if size != expected:
        raise ValueError(f"{path} has {size} bytes but its header describes {expected}: download it again")
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} has a damaged header ({error}): download it again")


def _find_tensors(folder):
    """{Hugging Face name: open file that holds it}, from model.safetensors or from the shards that the index names
    (and no others: a stray shard may belong to another model)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        handle = _open_safetensors(single)
        return {name: (handle, single) for name in handle.keys()}
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json: download "
                                f"the weights again, or convert them (pickled .bin files are not read)")
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
        raise ValueError(f"{index}: weight_map is missing, or does not map tensor names to file names")
    for name, file in where.items():
        if Path(file).name != file or "\\" in file or "\0" in file:
            raise ValueError(f"{index}: {name} lies in {file!r}, which is not a file name inside the folder")
    missing = sorted({file for file in where.values() if not (folder / file).is_file()})
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, named in {index.name}: download them again")
    handles = {file: _open_safetensors(folder / file) for file in sorted(set(where.values()))}
    found = {}
    for file, handle in handles.items():
        for name in handle.keys():
            if where.get(name) != file:
                raise ValueError(f"{folder / file} holds {name}, which {index.name} places in {where.get(name)}")
            found[name] = (handle, folder / file)
    for name in where.keys() - found.keys():
        raise ValueError(f"{index}: {name} should lie in {where[name]}, which does not hold it")
    return found


def read_tensors(folder, config):
    """Iterator of (our name, tensor in the file's dtype) over the weights of a checkpoint folder.

    Names, shapes and dtypes are checked in the call itself, from the headers alone; reading starts with the first
    item. ValueError or FileNotFoundError names file, tensor and remedy.
    """
    found = _find_tensors(Path(folder))
    parts = tensor_map(config)
    expected = {name: shape for pieces in parts.values() for name, shape in pieces}
    # Frequencies that old Llama files carry follow from config.json; a scale without its FP8 matrix does not.
    extra = sorted(n for n in found.keys() - expected.keys() if not n.endswith(".rotary_emb.inv_freq"))
    if config.tie_word_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        head, embedding = (found[n][0].get_tensor(n) for n in ("lm_head.weight", "model.embed_tokens.weight")
                           if n in found) if "model.embed_tokens.weight" in found else (None, None)
        if head is not None and not torch.equal(head, embedding):
            raise ValueError(f"{found['lm_head.weight'][1]}: lm_head.weight differs from the embedding although "
                             f"config.json says tie_word_embeddings = true: set it to false")
    for name, (handle, path) in found.items():
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {name} is stored as {dtype}, only {', '.join(DTYPES)} are read "
                             f"(take the unquantized release of the model)")
    missing = sorted(expected.keys() - found.keys())
    if missing or extra:
        what, names = ("lacks", missing) if missing else ("has unexpected", extra)
        hint = " (untied by config.json)" if missing == ["lm_head.weight"] else ""
        raise ValueError(f"{folder} {what} {len(names)} tensor(s): {', '.join(names[:4])}{hint}: "
                         f"config.json and weights do not belong together")
    for name, shape in expected.items():
        handle, path = found[name]
        got = tuple(handle.get_slice(name).get_shape())
        if got != shape:
            raise ValueError(f"{path}: {name} has shape {got}, config.json asks for {shape}")
    return ((name, _fuse([found[n][0].get_tensor(n) for n, _ in pieces])) for name, pieces in parts.items())


def _fuse(tensors):
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def write_tensors(folder, config, pairs):
    """Writes config.json, generation_config.json and model.safetensors (BF16, Hugging Face names) from an iterable of
    (our name, tensor). Each file appears whole or not at all, the weights last. ValueError for a wrong set or shape."""
    parts, out, seen = tensor_map(config), {}, set()
    for name, tensor in pairs:
        if name not in parts or name in seen:
            raise ValueError(f"{'a second' if name in seen else 'an unexpected'} tensor {name} of shape "
                             f"{tuple(tensor.shape)}")
        rows = [shape[0] for _, shape in parts[name]]
        whole = (sum(rows), *parts[name][0][1][1:])
        if tuple(tensor.shape) != whole:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {whole}")
        seen.add(name)
        for (theirs, _), piece in zip(parts[name], tensor.detach().split(rows)):
            # Copied even when nothing is converted: safetensors refuses pieces that share one storage.
            out[theirs] = piece.to("cpu", torch.bfloat16, copy=True).contiguous()
    if seen != parts.keys():
        raise ValueError(f"tensors not given: {', '.join(sorted(parts.keys() - seen)[:4])}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.to_dict()
    _write_json(folder / "config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": settings["eos_token_id"]})
    _write_atomic(folder / "model.safetensors",
                  lambda p: safetensors.torch.save_file(out, p, metadata={"format": "pt"}))


# ------------------------------------------------------------------------------------------------------
# Tokenizer
# ------------------------------------------------------------------------------------------------------

# Byte-level BPE files spell bytes as characters: visible Latin-1 stands for itself, the other 68 bytes get the
# characters from U+0100 on (so a space is "Ġ").
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [b for b in range(256) if b not in _VISIBLE]
BYTE_TO_CHAR = [chr(b) if b in _VISIBLE else chr(256 + _HIDDEN.index(b)) for b in range(256)]
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|%s| ?[^\s\p{L}\p{N}]+|\s+(?!%s)|\s+"
GPT2_SPLIT = _WORDS % (r" ?\p{N}+", r"\S")                  # what "ByteLevel" with use_regex stands for
# The same after "Digits" has cut out every digit: a digit takes no space before it, and a run of spaces before one
# stays whole, as at the end of a text.
DIGITS_SPLIT = _WORDS % (r"\p{N}", r"[^\s\p{N}]")
# Constructs that the tokenizers library (Oniguruma) and tiktoken (Rust) read differently.
_DIALECT = re.compile(r"\\[hHRXKGZzAbB]|(?<!\\)\$|(?<![\\\[])\^|&&|\[\[|\\p\{\^")


def _bytes_of(token):
    """The bytes of a vocabulary entry; KeyError if a character stands for no byte."""
    return bytes(map(CHAR_TO_BYTE.__getitem__, token))


def _split_pattern(pre, where):
    """The regular expression that cuts text into words before merging. Refuses what one expression cannot say."""
    steps = pre.get("pretokenizers") if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    steps = steps if isinstance(steps, list) and all(isinstance(s, dict) for s in steps) else []
    kinds = [step.get("type") for step in steps]
    refusal = ValueError(f"{where}: pre_tokenizer {json.dumps(pre)[:300]} is not supported")
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise refusal
    use_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"]:
        return GPT2_SPLIT if use_regex else r"(?s:.+)"
    if kinds == ["Digits", "ByteLevel"] and use_regex and steps[0].get("individual_digits") is True:
        return DIGITS_SPLIT
    if kinds != ["Split", "ByteLevel"] or use_regex:
        raise refusal
    split = steps[0]
    pattern = split.get("pattern", {}).get("Regex")
    if not isinstance(pattern, str) or split.get("behavior") != "Isolated" or split.get("invert"):
        raise refusal
    if _DIALECT.search(pattern):
        raise ValueError(f"{where}: split pattern {pattern!r} uses {_DIALECT.search(pattern).group()!r}, which "
                         f"regular expression engines read differently")
    return pattern


def _read_merges(model, where):
    """The vocabulary's byte pair merges as tiktoken wants them: ({bytes: rank}, [id of each rank]).

    tokenizer.json lists the pairs that may merge; tiktoken instead merges any two neighbours whose union is a token,
    lowest rank first. With ranks in the order of the list, the two agree if every token arises in one way only. That
    holds for a token whose listed halves `meet`: merging its bytes alone is deterministic, so no other halves can
    meet. A token whose halves never meet is never made (a Llama 3 file has some) and gets no rank.
    Ranks 0..255 are the bytes; -1 is the id of a byte that the vocabulary lacks.
    """
    vocab = model["vocab"]
    ranks = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}          # token (one character a byte) -> rank
    ids = [vocab.get(char, -1) for char in BYTE_TO_CHAR]
    halves, made = [None] * 256, {}                  # rank -> ranks of its two halves; ranks of two halves -> rank

    def meet(x, y, limit):
        """Whether tokens x|y stand side by side when merge `limit` is due, in a text of their bytes alone: walks back
        in time, undoing the younger of the two, and looks for an older merge across the border. Of two equal merges
        the left one comes first."""
        while made.get((x, y), limit) >= limit:
            if max(x, y) < 256:
                return True                                             # two bytes: the beginning
            if x > y:
                limit, x = x, halves[x][1]
            else:
                limit, y = y + 1, halves[y][0]
        return False

    skipped = []
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    for token, pairs in itertools.groupby(merges, "".join):
        for pair in pairs:
            if len(pair) != 2 or token not in vocab:
                raise ValueError(f"{where}: merge {pair} is not a pair, or makes a token that the vocabulary lacks")
            x, y = ranks.get(pair[0]), ranks.get(pair[1])
            if x is None or y is None:
                skipped.append(pair)
            elif token not in ranks and meet(x, y, len(ids)):
                made[x, y] = ranks[token] = len(ids)
                halves.append((x, y))
                ids.append(vocab[token])
    late = next((pair for pair in skipped if "".join(pair) not in ranks and set(pair) <= ranks.keys()), None)
    if late:
        raise ValueError(f"{where}: merge {late} comes before the merges that make its halves")
    if model.get("ignore_merges"):                   # then a whole word that is a token is taken as it is
        for token in vocab.keys() - ranks.keys():
            cuts = [(ranks.get(token[:i]), ranks.get(token[i:])) for i in range(1, len(token))]
            if any(None not in cut and max(cut) < len(halves) and meet(*cut, len(ids)) for cut in cuts):
                raise ValueError(f"{where}: token {token!r} has no merge of its own but two tokens that make it")
            if all(char in CHAR_TO_BYTE for char in token) and token:
                ranks[token] = len(ids)
                ids.append(vocab[token])
    return {_bytes_of(token): rank for token, rank in ranks.items()}, ids


BYTES_TEMPLATE = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}\
{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


class Tokenizer:
    """Text to ids and back, equal to the tokenizers library on the same tokenizer.json, on top of tiktoken.

    No BOS is added, whatever the file's post_processor says: a chat template writes its own, and two are one too
    many. Truncation and padding settings of the file are not used either.
    """

    def __init__(self, files, eos_ids, where="tokenizer.json"):
        """files: {"tokenizer.json": object, "tokenizer_config.json": object, "chat_template.jinja": str, the last two
        optional}; `where` stands in messages for the path of the first."""
        self.files, self.eos_ids, self.where = files, list(eos_ids), where
        raw = files["tokenizer.json"]
        try:
            self._check(raw)
            ranks, self._ids = _read_merges(raw["model"], where)
            self._bytes = {i: _bytes_of(t) for t, i in raw["model"]["vocab"].items() if set(t) <= CHAR_TO_BYTE.keys()}
            pattern = _split_pattern(raw.get("pre_tokenizer"), where)
            # Special tokens are cut out before, not by tiktoken: the file may leave them out of normalization.
            self._encoding = tiktoken.Encoding(Path(where).name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
            self._added = self._read_added(raw)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: not the tokenizer.json of a byte-level BPE "
                             f"({type(error).__name__}: {error})") from error
        self.vocab_size = max(self._bytes) + 1

    @classmethod
    def from_pretrained(cls, folder):
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two may be absent)."""
        folder, files = Path(folder), {}
        where = folder / "tokenizer.json"
        if not where.exists():
            raise FileNotFoundError(f"{where} does not exist: download it, or write one with transformers "
                                    f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))")
        files["tokenizer.json"] = _read_json(where)
        if (folder / "tokenizer_config.json").exists():
            files["tokenizer_config.json"] = _read_json(folder / "tokenizer_config.json")
        if (folder / "chat_template.jinja").exists():
            files["chat_template.jinja"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(files, read_eos_ids(folder), str(where))

    @classmethod
    def bytes(cls):
        """The tokenizer of models trained from scratch: a byte is its own id, four special tokens follow (260 in all)."""
        special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        added = [{"id": 256 + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                  "normalized": False, "special": True} for i, token in enumerate(special)]
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}, "merges": []}
        raw = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
               "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0],
                    "clean_up_tokenization_spaces": False, "chat_template": BYTES_TEMPLATE}
        return cls({"tokenizer.json": raw, "tokenizer_config.json": settings}, [256])

    def save(self, folder):
        """Writes the files that it was made from."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if isinstance(content, str):
                _write_atomic(Path(folder, name), lambda p, text=content: p.write_text(text, encoding="utf-8"))
            else:
                _write_json(Path(folder, name), content)

    def _check(self, raw):
        """Refuses the parts of tokenizer.json that would give other ids than those computed here."""
        model, decoder = raw["model"], raw.get("decoder")
        for name, allowed in {"type": ["BPE", None], "dropout": [None, 0], "continuing_subword_prefix": [None, ""],
                              "end_of_word_suffix": [None, ""]}.items():
            if model.get(name) not in allowed:
                raise ValueError(f"{self.where}: model {name} = {model[name]!r} is not supported")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise ValueError(f"{self.where}: decoder {json.dumps(decoder)[:200]} is not supported, only ByteLevel")
        normalizer = raw.get("normalizer")
        steps = normalizer.get("normalizers") if normalizer and normalizer["type"] == "Sequence" else [normalizer]
        if any(step is not None and step.get("type") != "NFC" for step in steps):
            raise ValueError(f"{self.where}: normalizer {json.dumps(normalizer)[:200]} is not supported, only NFC")
        self._nfc = any(steps)

    def _normalize(self, text):
        return unicodedata.normalize("NFC", text) if self._nfc else text

    def _read_added(self, raw):
        """Two (regular expression, {content: (id, special)}), for tokens looked for in the raw and in the normalized
        text. The longest of several at one place wins."""
        tables = {}, {}
        for token in raw.get("added_tokens") or []:
            for name in ("single_word", "lstrip", "rstrip"):
                if token.get(name):
                    raise ValueError(f"{self.where}: added token {token['content']!r} has {name} = true, "
                                     f"which is not supported")
            if not token["content"]:
                continue
            text = self._normalize(token["content"]) if token["normalized"] else token["content"]
            tables[bool(token["normalized"])][text] = token["id"], token["special"]
            self._bytes[token["id"]] = token["content"].encode()
        longest_first = [sorted(table, key=len, reverse=True) for table in tables]
        return [(re.compile("|".join(map(re.escape, texts)) or r"(?!)"), table)
                for texts, table in zip(longest_first, tables)]

    def _cut(self, which, text, parse_special):
        """Yields (text, None) for what lies between added tokens and ("", id) for each of them."""
        regex, table = self._added[which]
        start = 0
        for match in regex.finditer(text):
            token, special = table[match.group()]
            if special and not parse_special:
                continue
            yield text[start:match.start()], None
            yield "", token
            start = match.end()
        yield text[start:], None

    def encode(self, text, parse_special=True):
        """Ids of a text. Special tokens in the text become their ids; parse_special=False takes them as plain text
        (added tokens that the file does not call special, such as Qwen's <think>, are parsed either way, as in the
        tokenizers library). Lone surrogates become U+FFFD. ValueError for a byte that the vocabulary lacks."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = []
        for raw, token in self._cut(0, text, parse_special):
            if token is not None:
                ids.append(token)
                continue
            for part, token in self._cut(1, self._normalize(raw), parse_special):
                if token is not None:
                    ids.append(token)
                elif part:
                    ids.extend(self._encode_plain(part))
        return ids

    def _encode_plain(self, text):
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
        """Text of a list of ids, special tokens included. Bytes that are no UTF-8 become U+FFFD; ids beyond the
        tokenizer (rows that pad the vocabulary) give nothing."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def chat(self, messages, thinking=None):
        """Ids of [{"role": ..., "content": ...}, ...] with the prompt for the answer, by the checkpoint's own template.

        thinking: None leaves the template's default; True or False is its variable enable_thinking. As in Hugging
        Face's apply_chat_template the rendered text is parsed as a whole, so a special token that a message spells
        out becomes one.
        """
        return self.encode(self.render(messages, thinking))

    def render(self, messages, thinking=None):
        """The text that `chat` encodes."""
        settings = self.files.get("tokenizer_config.json", {})
        source = self.files.get("chat_template.jinja", settings.get("chat_template"))
        if isinstance(source, list):                    # several named templates
            source = {t.get("name"): t.get("template") for t in source}.get("default")
        if not isinstance(source, str):
            raise ValueError(f"{self.where}: there is no chat template beside it (a base model?): encode plain text")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: _token_text(settings[name]) for name in names if settings.get(name) is not None}
        if thinking is not None:
            values["enable_thinking"] = thinking
        # The settings and helpers that templates are written for. ImmutableSandboxedEnvironment: a template is
        # code from a download.
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = _tojson
        env.globals |= {"raise_exception": _raise_exception,
                        "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
        try:
            return env.from_string(source).render(messages=messages, tools=None, documents=None,
                                                  add_generation_prompt=True, **values)
        except (jinja2.TemplateError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.where}: the chat template failed: {error}") from error


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja's own escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
