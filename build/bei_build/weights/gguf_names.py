"""Tensors of a GGUF file under the names, and with the values, that the model's library has for them.

llama.cpp's converter (conversion/*.py there) renames all tensors and changes some: it reorders the rows of Llama's
queries and keys for its own way of rotating, adds 1 to the weights of Gemma's norms, and leaves out the first
rows of RoBERTa's position table: that of padding, which is not trained, and those before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.families.base import Family
from bei_build.weights.gguf_file import GgufHeader
from bei_build.weights.gguf_store import GgufStore
from bei_build.weights.tensor_store import WrappedStore

# llama.cpp's name of a module -> ours; several where it joins what we have apart.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "token_embd": ("embeddings.word",),
    "token_types": ("embeddings.type",),
    "position_embd": ("embeddings.position",),
    "token_embd_norm": ("embeddings.norm",),
    "output_norm": ("final_norm",),
    "output": ("lm_head",),
    "cls": ("classifier.dense",),
    "cls.output": ("classifier.out",),
    "blk.{i}.attn_q": ("layers.{i}.attention.query",),
    "blk.{i}.attn_k": ("layers.{i}.attention.key",),
    "blk.{i}.attn_v": ("layers.{i}.attention.value",),
    "blk.{i}.attn_qkv": ("layers.{i}.attention.query", "layers.{i}.attention.key", "layers.{i}.attention.value"),
    "blk.{i}.attn_q_norm": ("layers.{i}.attention.query_norm",),
    "blk.{i}.attn_k_norm": ("layers.{i}.attention.key_norm",),
    "blk.{i}.attn_output": ("layers.{i}.attention.output",),
    "blk.{i}.attn_norm": ("layers.{i}.attention_norm",),
    "blk.{i}.attn_output_norm": ("layers.{i}.attention_norm",),
    "blk.{i}.post_attention_norm": ("layers.{i}.attention_post_norm",),
    "blk.{i}.attn_norm_2": ("layers.{i}.second_attention_norm",),
    "blk.{i}.ffn_up": ("layers.{i}.mlp.up",),
    "blk.{i}.ffn_gate": ("layers.{i}.mlp.gate",),
    "blk.{i}.ffn_down": ("layers.{i}.mlp.down",),
    "blk.{i}.ffn_norm": ("layers.{i}.mlp_norm",),
    "blk.{i}.layer_output_norm": ("layers.{i}.mlp_norm",),
    "blk.{i}.post_ffw_norm": ("layers.{i}.mlp_post_norm",),
}
# Modules that ModernBERT's heads have in place of RoBERTa's.
_PREDICTION_HEAD = {"cls": ("head.dense",), "cls.norm": ("head.norm",), "cls.output": ("classifier",)}
# Architectures by general.architecture, with the model types that their tensors may have.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "bert": ("bert", "distilbert", "roberta", "xlm-roberta"),
    "jina-bert-v2": ("bert",),
    "nomic-bert": ("nomic_bert",),
    "modern-bert": ("modernbert",),
    "llama": ("llama", "mistral", "ministral"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "gemma3": ("gemma3_text",),
    "gemma-embedding": ("gemma3_text",),
}
_SKIPS_POSITIONS = ("roberta", "xlm-roberta")
ROPE_FACTORS = "rope_freqs.weight"
# Dense modules behind the pooling, which ``gguf_folder`` writes out.
DENSE = ("dense_2.weight", "dense_3.weight")
_LAYER = re.compile(r"^blk\.(\d+)\.")


class GgufNames(WrappedStore):
    """The tensors of ``store`` as ``family``'s library has them. Raises WeightsError for those it has not."""

    def __init__(self, store: GgufStore, family: Family) -> None:
        super().__init__(store)
        self._header = store.header
        self._norm_offset = np.float32(family.norm_offset)
        check_architecture(store.header)
        arch = store.header.architecture
        if family.model_type not in ARCHITECTURES[arch]:
            raise WeightsError(
                f"The GGUF file holds a {arch}, and config.json describes a {family.model_type}: the two are not from "
                "the same checkpoint."
            )
        self._stored: dict[str, str] = {}
        for stored in store.shapes:
            if stored == ROPE_FACTORS or stored in DENSE:
                continue
            name = _library_name(stored, family)
            if (other := self._stored.setdefault(name, stored)) != stored:
                raise WeightsError(f"Tensors {other} and {stored} of the GGUF file are both {name}.")
        self._first_row = _first_position(store.header, family)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        shapes = self._store.shapes
        found = {name: shapes[stored] for name, stored in self._stored.items()}
        for name, stored in self._stored.items():
            if stored == "position_embd.weight":
                rows, *width = found[name]
                found[name] = (rows + self._first_row, *width)
        return found

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        stored = self._stored[name]
        array, arch = self._store.read(stored), self._header.architecture
        if stored == "position_embd.weight" and self._first_row:
            return np.concatenate([np.zeros((self._first_row, array.shape[1]), np.float32), array])
        if self._norm_offset and stored.endswith("norm.weight"):
            return array - self._norm_offset
        if arch == "llama" and (part := stored.split(".")[-2]) in ("attn_q", "attn_k"):
            return _rotated_halves(array, num_heads(self._header, kv=part == "attn_k"))
        return array

    def _stored_name(self, name: str) -> str:
        return self._stored[name]

    def rope_frequencies(self) -> npt.NDArray[np.float32] | None:
        """The frequencies of scaled rotations, which Llama's files have as factors; None where there are none."""
        if ROPE_FACTORS not in self._store.shapes:
            return None
        factors = self._store.read(ROPE_FACTORS).reshape(-1)
        theta = np.float32(self._header.value(f"{self._header.architecture}.rope.freq_base", float, 10000.0))
        exponents = np.arange(len(factors), dtype=np.float32) / np.float32(len(factors))
        frequencies: npt.NDArray[np.float32] = (1 / theta**exponents / factors).astype(np.float32)
        return frequencies


def check_architecture(header: GgufHeader) -> None:
    """Raise WeightsError for an architecture of llama.cpp that is not read."""
    if header.architecture not in ARCHITECTURES:
        raise WeightsError(
            f"The GGUF file's general.architecture is {header.architecture!a}; bei reads {', '.join(ARCHITECTURES)}. "
            "Build from the original checkpoint, the one with config.json and safetensors."
        )


def num_heads(header: GgufHeader, *, kv: bool) -> int:
    """Heads of queries, or of keys and values. Raises WeightsError."""
    arch = header.architecture
    heads = header.metadata.get(f"{arch}.attention.head_count")
    found = header.metadata.get(f"{arch}.attention.head_count_kv", heads) if kv else heads
    if type(found) is not int or not 1 <= found <= 1 << 20:
        raise WeightsError(f"The GGUF file's {arch}.attention.head_count is {found!r:.40}: it must be one number.")
    return found


def padding_id(header: GgufHeader) -> int:
    """The id of RoBERTa's padding, behind which its positions begin. Raises WeightsError."""
    padding = header.metadata.get("tokenizer.ggml.padding_token_id", 1)
    if type(padding) is not int or not 0 <= padding < 100:
        raise WeightsError(
            f"The GGUF file's tokenizer.ggml.padding_token_id is {padding!r:.40}: it must be a number below 100."
        )
    return padding


def _library_name(stored: str, family: Family) -> str:
    module, _, kind = stored.rpartition(".")
    layer = _LAYER.match(stored)
    module = _LAYER.sub("blk.{i}.", module)
    ours = (_PREDICTION_HEAD if "head.dense" in family.weights else {}).get(module) or _MODULES.get(module, ())
    if module == "blk.{i}.ffn_up" and _joined(family):
        ours = ("layers.{i}.mlp.gate", "layers.{i}.mlp.up")
    names = [_alternatives(name, kind, family) for name in ours]
    common = [name for name in names[0] if all(name in others for others in names)] if names else []
    if not common or kind not in ("weight", "bias"):
        more = (
            " (llama.cpp's converter leaves BERT's pooler out, which its classifiers need)" if "cls" in module else ""
        )
        raise WeightsError(
            f"Tensor {stored!a} of the GGUF file has no place in bei's {family.model_type} family{more}. Build from "
            "the original checkpoint, the one with config.json and safetensors."
        )
    return common[0].replace("{i}", layer[1] if layer else "")


def _alternatives(ours: str, kind: str, family: Family) -> list[str]:
    """The library's names of ``ours``.``kind``."""
    whole = family.weights.get(f"{ours}.{kind}")
    if whole is not None:
        return [whole] if isinstance(whole, str) else list(whole)
    names = family.weights.get(ours, ())
    return [f"{name}.{kind}" for name in ((names,) if isinstance(names, str) else names)]


def _joined(family: Family) -> bool:
    """True if the library joins the two halves of a gated MLP, as the converter leaves them."""
    gate, up = (family.weights.get(f"layers.{{i}}.mlp.{part}") for part in ("gate", "up"))
    return gate is not None and gate == up


def _first_position(header: GgufHeader, family: Family) -> int:
    """The row of the library's position table that the file has first."""
    if family.model_type not in _SKIPS_POSITIONS:
        return 0
    return padding_id(header) + 1


def _rotated_halves(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys whose neighbours rotate together, so that those of a head's two halves do."""
    if array.shape[0] % (2 * heads):
        raise WeightsError(f"The GGUF file's queries or keys have {array.shape[0]} rows for {heads} heads.")
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
