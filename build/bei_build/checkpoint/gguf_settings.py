"""Settings of a GGUF file's metadata, as the config.json and the sentence-transformers files that they came from.

llama.cpp's code knows what its files do not say (BERT's activation, Gemma 3's order of layers): the values here are the
ones that it computes with. A key of the architecture that is not read is refused by name: it may change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bei.errors import CheckpointError
from bei_build.files.size_limits import largest
from bei_build.weights.gguf_file import GgufHeader
from bei_build.weights.gguf_names import ROPE_FACTORS, num_heads, padding_id

# Keys after "ARCHITECTURE." that are read, by all architectures and by each of them.
_SHAPE = (
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "pooling_type"),
    *("attention.head_count", "attention.head_count_kv", "attention.causal"),
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
)
_ROPE = ("rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_ROPE_KEYS = (*_ROPE, *_SCALING, "rope.scaling.finetuned", "rope.scaling.attn_factor")
# Keys of sizes -> the keys of config.json whose bounds they have.
_SIZES = {
    **dict.fromkeys(("block_count", "attention.sliding_window_pattern"), "num_hidden_layers"),
    **dict.fromkeys(
        ("context_length", "rope.scaling.original_context_length", "attention.sliding_window"),
        "max_position_embeddings",
    ),
    **{"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size"},
    **dict.fromkeys(("attention.key_length", "rope.dimension_count"), "head_dim"),
}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_NO_POOLING, _RANK = 0, 4
_BESIDE = "Put the model's own config.json and tokenizer.json beside the file"
# (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) of Llama 3.1 and of 3.2.
_LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


class Metadata:
    """The metadata of ``header``, read by key and checked. ``shapes`` are those of its tensors."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self._arch = header.architecture

    def keys(self) -> list[str]:
        """The architecture's keys."""
        return [key.removeprefix(f"{self._arch}.") for key in self.header.metadata if key.startswith(f"{self._arch}.")]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of the architecture's ``key``. Raises CheckpointError for one of another type."""
        return self.header.value(f"{self._arch}.{key}", kind, default)

    def number(self, key: str, default: int | None = None) -> int:
        """The size under ``key``, one of ``_SIZES``; ``default`` where it is missing. Raises CheckpointError for one
        that no model has, before anything of that size is made, and where it is missing without a default."""
        value, most = self.get(key, int), largest(_SIZES[key])
        if value is None and default is not None:
            return default
        if value is None:
            raise self.refused(f"has no {self._arch}.{key}")
        if most is None or not 1 <= value <= most:
            raise self.refused(f"has {self._arch}.{key} = {value}, and models have from 1 to {most:,}")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """The number under ``key``, without the digits that float32 has added to it."""
        value = self.get(key, float, default)
        if value is None:
            raise self.refused(f"has no {self._arch}.{key}")
        return float(str(np.float32(value)))

    def rows(self, tensor: str) -> int:
        """Rows of ``tensor``, 0 where it is missing."""
        return self.shapes.get(tensor, (0,))[0]

    def require(self, key: str, expected: object) -> None:
        """Raise CheckpointError if ``key`` is there with another value."""
        value = self.header.metadata.get(f"{self._arch}.{key}", expected)
        if value != expected:
            raise self.refused(f"has {self._arch}.{key} = {value!r:.60}, and bei reads {expected!r}")

    def check_keys(self, *known: str) -> None:
        """Raise CheckpointError for a key that is none of ``known``."""
        unknown = sorted(set(self.keys()) - {*_SHAPE, *known})
        if unknown:
            raise self.refused(f"has {self._arch}.{unknown[0]}, which bei does not read from metadata")

    def refused(self, what: str) -> CheckpointError:
        """The error for metadata that does not say, or not in words that are known, what the model is."""
        return CheckpointError(f"The GGUF file {what}. {_BESIDE}.")


def config_of(header: GgufHeader) -> dict[str, Any]:
    """config.json of the model in the file with ``header``. Raises CheckpointError."""
    metadata = Metadata(header)
    return {**_CONFIGS[header.architecture](metadata), "vocab_size": metadata.rows("token_embd.weight")}


def pooling_of(header: GgufHeader) -> dict[str, Any] | None:
    """config.json of sentence-transformers' Pooling; None where the file names no pooling. Raises CheckpointError."""
    kind = Metadata(header).get("pooling_type", int)
    if kind in (None, _NO_POOLING, _RANK):
        return None
    if kind not in _POOLINGS:
        raise Metadata(header).refused(f"has pooling_type {kind}")
    width = Metadata(header).number("embedding_length")
    return {"word_embedding_dimension": width, "pooling_mode": _POOLINGS[kind]}


def _encoder(metadata: Metadata) -> dict[str, Any]:
    metadata.require("attention.causal", False)
    return {
        "hidden_size": metadata.number("embedding_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": num_heads(metadata.header, kv=False),
        "intermediate_size": metadata.number("feed_forward_length"),
        "max_position_embeddings": metadata.number("context_length"),
        "layer_norm_eps": metadata.real("attention.layer_norm_epsilon"),
        "type_vocab_size": metadata.rows("token_types.weight"),
        "hidden_act": "gelu",
    }


def _bert(metadata: Metadata) -> dict[str, Any]:
    """BERT, DistilBERT (which has no token types), RoBERTa and XLM-RoBERTa, told apart by the kind of vocabulary."""
    metadata.check_keys("classifier.output_labels")
    vocabulary = metadata.header.value("tokenizer.ggml.model", str)
    config = _encoder(metadata)
    if vocabulary == "bert":
        if metadata.get("pooling_type", int) == _RANK or "cls.output.weight" in metadata.shapes:
            raise metadata.refused("holds a classifier without BERT's pooler, which the converter leaves out")
        if config["type_vocab_size"]:
            return {**config, "model_type": "bert", "architectures": ["BertModel"]}
        return _distilbert(metadata, config)
    kinds = {"t5": ("xlm-roberta", "XLMRoberta"), "gpt2": ("roberta", "Roberta")}
    if vocabulary not in kinds:
        raise metadata.refused(f"has a BERT with tokenizer.ggml.model = {vocabulary!r:.40}")
    model_type, prefix = kinds[vocabulary]
    padding = padding_id(metadata.header)
    config["max_position_embeddings"] += padding + 1
    labels = _labels(metadata)
    task = "ForSequenceClassification" if labels else "Model"
    return {**config, **labels, "model_type": model_type, "architectures": [prefix + task], "pad_token_id": padding}


def _distilbert(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.require("attention.layer_norm_epsilon", float(np.float32(1e-12)))
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }


def _labels(metadata: Metadata) -> dict[str, Any]:
    """The labels of a classifier; empty for an embedder."""
    count = metadata.rows("cls.output.weight")
    if not count:
        return {}
    if count > (most := largest("num_labels") or 0):
        raise metadata.refused(f"has {count:,} scores, and no model has more than {most:,}")
    labels = metadata.get("classifier.output_labels", list)
    if labels is not None and (len(labels) != count or count > 10):  # the converter sorts "10" before "2"
        raise metadata.refused(f"has {len(labels)} labels for {count} scores, in an order that it does not say")
    return {"id2label": {str(at): name for at, name in enumerate(labels or [f"LABEL_{n}" for n in range(count)])}}


def _nomic(metadata: Metadata) -> dict[str, Any]:
    metadata.check_keys("rope.freq_base")
    return {
        **_encoder(metadata),
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata.real("rope.freq_base")},
    }


def _jina(metadata: Metadata) -> dict[str, Any]:
    metadata.check_keys("attention.max_alibi_bias")
    metadata.require("attention.max_alibi_bias", 8.0)
    config = {**_encoder(metadata), "model_type": "bert", "architectures": ["JinaBertModel"]}
    has_norms = "blk.0.attn_q_norm.weight" in metadata.shapes
    code = "jinaai/jina-bert-v2-qk-post-norm--" if has_norms else "jinaai/jina-bert-implementation--"
    places = {
        "AutoConfig": f"{code}configuration_bert.JinaBertConfig",
        "AutoModel": f"{code}modeling_bert.JinaBertModel",
    }
    return {**config, "position_embedding_type": "alibi", "feed_forward_type": "geglu", "auto_map": places}


def _modern_bert(metadata: Metadata) -> dict[str, Any]:
    swa = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
    metadata.check_keys(*_ROPE_KEYS, *swa, "hidden_act", "classifier.output_labels")
    metadata.require("rope.scaling.type", "none")
    if "cls.weight" in metadata.shapes or "cls.output.weight" in metadata.shapes:
        raise metadata.refused("holds a classifier of ModernBERT, whose pooling it does not say")
    config = _encoder(metadata)
    return {
        **{
            key: value
            for key, value in config.items()
            if key not in ("hidden_act", "layer_norm_eps", "type_vocab_size")
        },
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "norm_eps": metadata.real("attention.layer_norm_epsilon"),
        "hidden_activation": metadata.get("hidden_act", str, "gelu"),
        "global_attn_every_n_layers": metadata.number("attention.sliding_window_pattern", 3),
        "local_attention": metadata.number("attention.sliding_window"),
        "global_rope_theta": metadata.real("rope.freq_base", 160000.0),
        "local_rope_theta": metadata.real("rope.freq_base_swa", 10000.0),
    }


def _decoder(metadata: Metadata, *known: str) -> dict[str, Any]:
    metadata.check_keys(*_ROPE_KEYS, *known)
    heads, width = num_heads(metadata.header, kv=False), metadata.number("embedding_length")
    head_dim = metadata.number("attention.key_length", metadata.number("rope.dimension_count", width // heads))
    metadata.require("attention.value_length", head_dim)
    metadata.require("rope.dimension_count", head_dim)
    if metadata.get("pooling_type", int) == _RANK or "cls.output.weight" in metadata.shapes:
        raise metadata.refused("holds a reranker made of a language model, whose template and tokens it does not say")
    causal = metadata.get("attention.causal", bool, True)
    return {
        "hidden_size": width,
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": num_heads(metadata.header, kv=True),
        "head_dim": head_dim,
        "intermediate_size": metadata.number("feed_forward_length"),
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in metadata.shapes,
        **({} if causal else {"is_causal": False}),
        **_rope_scaling(metadata),
    }


def _rope_scaling(metadata: Metadata) -> dict[str, Any]:
    """``rope_scaling`` of config.json; empty for a plain rotation. Raises CheckpointError."""
    metadata.require("rope.scaling.attn_factor", 1.0)
    kind = metadata.get("rope.scaling.type", str, "none")
    if ROPE_FACTORS in metadata.shapes:
        return {}  # ``gguf_folder`` finds which they are
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": metadata.real("rope.scaling.factor")}}
    if kind == "yarn":
        original = metadata.number("rope.scaling.original_context_length")
        factor = metadata.real("rope.scaling.factor")
        return {"rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}}
    raise metadata.refused(f"has {metadata.header.architecture}.rope.scaling.type = {kind!r:.40}")


def _llama(metadata: Metadata) -> dict[str, Any]:
    config = {"model_type": "llama", "architectures": ["LlamaModel"], **_decoder(metadata)}
    biases = {part: f"blk.0.{part}.bias" in metadata.shapes for part in ("attn_q", "attn_output", "ffn_up")}
    return {**config, "attention_bias": biases["attn_output"], "mlp_bias": biases["ffn_up"]}


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2Model"], **_decoder(metadata)}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in metadata.shapes
    return {"model_type": "qwen3", "architectures": ["Qwen3Model"], **_decoder(metadata), "attention_bias": bias}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    keys = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
    config = {**_decoder(metadata, *keys), "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"]}
    metadata.require("attention.sliding_window_pattern", 6)
    metadata.require("rope.freq_base_swa", 10000.0)
    if config["num_hidden_layers"] == 62:  # the 27B model, whose scores llama.cpp scales by another width
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]
    window = metadata.number("attention.sliding_window", 0)
    types = [
        ["sliding_attention", "full_attention"][not window or at % 6 == 5] for at in range(config["num_hidden_layers"])
    ]
    return {**config, "layer_types": types, "sliding_window": window or 4096, "rope_local_base_freq": 10000.0}


def _embedding_gemma(metadata: Metadata) -> dict[str, Any]:
    # The converter writes config.json's own window; transformers' class halves it for bidirectional attention.
    dense = [f"dense_{at}_feat_{end}" for at in (2, 3) for end in ("in", "out")]
    metadata.require("attention.causal", False)
    inner = Metadata(_without(metadata.header, *dense, "attention.causal"))
    return {**_gemma3(inner), "use_bidirectional_attention": True}


def _without(header: GgufHeader, *keys: str) -> GgufHeader:
    named = {f"{header.architecture}.{key}" for key in keys}
    kept = {key: value for key, value in header.metadata.items() if key not in named}
    return GgufHeader(kept, header.tensors, header.data_start, header.alignment)


_CONFIGS: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "bert": _bert,
    "nomic-bert": _nomic,
    "jina-bert-v2": _jina,
    "modern-bert": _modern_bert,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma-embedding": _embedding_gemma,
}


def llama3_scaling(
    factors: np.ndarray[Any, np.dtype[np.float32]], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """``rope_scaling`` of the Llama whose file has ``factors``; None where they are none of Llama 3's."""
    if 2 * factors.size != head_dim:
        return None
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    waves = 2 * np.pi / plain
    for factor, low, high, context in _LLAMA3:
        ramp = np.clip((context / waves - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - ramp) / factor + ramp), rtol=1e-4):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, context), strict=True))}
    return None
