"""GGUF files of tiny checkpoints, written with llama.cpp's own package, and changed as its converter changes them.

The converter (conversion/*.py of ggml-org/llama.cpp) is no package; what it does to the tensors is repeated here. Names
are those of the package's table.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer

from bei.core import Float32Array
from tests.support.checkpoints import read_tensors

_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
_LEFT_OUT = re.compile(r"embeddings\.position_ids|pooler\.dense\..*|cls\.(predictions|seq_relationship)\..*")
_PREFIX = re.compile(r"^(bert|roberta|distilbert|nomic_bert|model)\.")
# Transformers' names of NomicBERT's tensors -> the original code's, which the converter knows.
_NOMIC = {
    "self_attn.o_proj": "attn.out_proj",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
}
_QKV = re.compile(r"(.*layers\.\d+)\.self_attn\.[qkv]_proj\.(.*)")


def save_gguf(
    source: Path,
    file: Path,
    arch: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    kind: str = "F32",
    extra: Mapping[str, Float32Array] | None = None,
) -> Path:
    """Write the checkpoint in ``source`` to ``file``, as architecture ``arch``; matrices as ``kind`` where their rows
    allow it, else as F16. ``metadata`` is added to what the converter writes for all; ``extra``: more tensors."""
    config = json.loads((source / "config.json").read_text())
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, arch)
    for key, value in {**shape_metadata(arch, config), **(metadata or {})}.items():
        _add(writer, key, value)
    tensors = {**dict(_converted(source, arch, config)), **(extra or {})}
    for name, array in tensors.items():
        _add_tensor(writer, name, array, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def shape_metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes of config.json."""

    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    skipped = config["pad_token_id"] + 1 if config["model_type"] in ("roberta", "xlm-roberta") else 0
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    values = {
        "context_length": first("max_position_embeddings") - skipped,
        "embedding_length": first("hidden_size", "dim"),
        "feed_forward_length": first("intermediate_size", "hidden_dim"),
        "block_count": first("num_hidden_layers", "n_layers"),
        "attention.head_count": first("num_attention_heads", "n_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_epsilon": _real(first("layer_norm_eps", "norm_eps") or 1e-12),
        "attention.layer_norm_rms_epsilon": _real(config.get("rms_norm_eps")),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": _real(first("global_rope_theta", "rope_theta") or rope.get("rope_theta")),
    }
    if arch in ("bert", "jina-bert-v2"):
        values["rope.freq_base"] = None
    if "bert" not in arch:
        values["attention.layer_norm_epsilon"] = None
    else:
        values["attention.causal"] = False
        values |= dict.fromkeys(("attention.key_length", "attention.value_length"))
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


def vocabulary_metadata(tokenizer: Tokenizer, model: str, pre: str = "default") -> dict[str, Any]:
    """What the converter writes of a tokenizer.json."""
    content = json.loads(tokenizer.to_str())
    special = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values()) + 1
    words = {at: word for word, at in vocabulary.items()}
    tokens = [words.get(at, f"[PAD{at}]") for at in range(size)]
    types = [special.get(words[at], 1) if at in words else 5 for at in range(size)]
    found: dict[str, Any] = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
    if model == "bert":
        pairs = zip(tokens, types, strict=True)
        tokens = [t if kind == 3 else t[2:] if t.startswith("##") else f"\u2581{t}" for t, kind in pairs]
    if model == "gpt2":
        found["tokenizer.ggml.merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    if model == "t5":
        types[content["model"]["unk_id"]] = 2
        found["tokenizer.ggml.scores"] = [np.float32(score) for _, score in content["model"]["vocab"]]
        found["tokenizer.ggml.add_space_prefix"] = found["tokenizer.ggml.remove_extra_whitespaces"] = True
    found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"] = tokens, types
    names = {
        "bos": ("<s>", "[CLS]"),
        "eos": ("<|endoftext|>", "</s>", "[SEP]"),
        "unknown": ("<unk>", "[UNK]"),
        "padding": ("<pad>", "[PAD]"),
        "mask": ("<mask>", "[MASK]"),
    }
    for name, spelled in names.items():
        if (at := next((vocabulary[word] for word in spelled if word in vocabulary), None)) is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = at
    return found


def _real(value: float | None) -> np.float32 | None:
    return None if value is None else np.float32(value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, np.floating):
        writer.add_float32(key, float(value))
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, [float(one) if isinstance(one, np.floating) else one for one in value])


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: Float32Array, kind: str) -> None:
    wanted = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    if array.shape[-1] % block:
        wanted = gguf.GGMLQuantizationType.F16
    if wanted.name in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float32 if wanted.name == "F32" else np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)


def _converted(source: Path, arch: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    """llama.cpp's names and numbers of the tensors in ``source``."""
    table = gguf.get_tensor_name_map(_ARCHITECTURES[arch], config.get("num_hidden_layers") or config["n_layers"])
    tensors = {_PREFIX.sub("", name): tensor.float().numpy() for name, tensor in read_tensors(source).items()}
    for name, array in _named_as_originally(tensors, arch).items():
        if _LEFT_OUT.fullmatch(name):
            continue
        if arch in ("llama", "qwen2", "qwen3", "gemma3", "gemma-embedding") and not name.startswith("lm_head"):
            name = f"model.{name}"
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, _changed(found, array, arch, config)


def _named_as_originally(tensors: Mapping[str, Float32Array], arch: str) -> dict[str, Float32Array]:
    if arch != "nomic-bert":
        return dict(tensors)
    found: dict[str, Float32Array] = {}
    for name, array in tensors.items():
        if match := _QKV.fullmatch(name):
            parts = [tensors[f"{match[1]}.self_attn.{part}_proj.{match[2]}"] for part in "qkv"]
            found[f"encoder.{match[1]}.attn.Wqkv.{match[2]}"] = np.concatenate(parts)
            continue
        for now, then in _NOMIC.items():
            name = name.replace(now, then)
        found[f"encoder.{name}" if name.startswith("layers.") else name] = array
    return found


def _changed(name: str, array: Float32Array, arch: str, config: Mapping[str, Any]) -> Float32Array:
    if name == "position_embd.weight" and config["model_type"] in ("roberta", "xlm-roberta"):
        return array[config["pad_token_id"] + 1 :]
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return array + np.float32(1)
    if arch == "llama" and ".attn_q." in name:
        return _permuted(array, config["num_attention_heads"])
    if arch == "llama" and ".attn_k." in name:
        return _permuted(array, config["num_key_value_heads"])
    return array


def _permuted(array: Float32Array, heads: int) -> Float32Array:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def header_bytes(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), *, version: int = 3) -> bytes:
    """A header of the given entries."""
    counts = (len(tensors).to_bytes(8, "little"), len(keys).to_bytes(8, "little"))
    return b"GGUF" + version.to_bytes(4, "little") + b"".join((*counts, *keys, *tensors))


def zeros_file(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """A whole file of ``metadata`` of any type and, of zeros in float32, tensors of ``shapes``."""
    places, end = [], 0
    for name, shape in shapes.items():
        places.append(tensor_bytes(name, shape[::-1], 0, end))
        end += -(-4 * math.prod(shape) // 32) * 32
    header = header_bytes([key_bytes(key, *_value_bytes(value)) for key, value in metadata.items()], places)
    return header + bytes(-len(header) % 32 + end)


def _value_bytes(value: Any) -> tuple[int, bytes]:
    """The number of the type of ``value``, and its bytes."""
    if isinstance(value, list):
        items = [_value_bytes(one) for one in value] or [(4, b"")]
        return 9, struct.pack("<IQ", items[0][0], len(value)) + b"".join(content for _, content in items)
    if isinstance(value, str):
        return 8, text_bytes(value)
    kinds = {bool: (7, "<?"), int: (11, "<q")}
    kind, form = kinds.get(type(value), (6, "<f"))
    return kind, struct.pack(form, value)


def key_bytes(name: str, kind: int, value: bytes) -> bytes:
    """An entry of the metadata."""
    return text_bytes(name) + kind.to_bytes(4, "little") + value


def tensor_bytes(name: str, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry of the table of tensors; ``sizes`` in the file's order, the row's first."""
    dimensions = b"".join(size.to_bytes(8, "little") for size in sizes)
    ends = kind.to_bytes(4, "little") + offset.to_bytes(8, "little")
    return text_bytes(name) + len(sizes).to_bytes(4, "little") + dimensions + ends


def text_bytes(text: str) -> bytes:
    """A text with its length before it."""
    return len(text.encode()).to_bytes(8, "little") + text.encode()
