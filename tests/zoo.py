"""The supported models, one case a structural feature: tiny random checkpoints of the Hugging Face classes.

Every row of docs/models.md is a case here. Sizes are small and every feature is on: grouped heads, a head width that
is not hidden / heads, biases, windows shorter than the texts, soft caps, norms of queries and keys, scaled rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from tests.checkpoints import bpe_tokenizer, change_config, unigram_tokenizer, wordpiece_tokenizer

MAX_TOKENS = 48
WINDOW = 8


@dataclass(frozen=True)
class Case:
    """One checkpoint. ``architecture`` is the HF class; ``saved_as`` another name that its config.json gets.

    ``settings`` configure the class, ``changes`` are written into config.json afterwards (keys of remote code).
    ``unmasked``: a decoder whose tokens see each other, although its class would mask them. ``alone``: the HF class
    gives a text other outputs in a batch with longer ones (LongRoPE), so it is asked one by one.
    """

    family: str
    architecture: str
    settings: dict[str, Any]
    tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer
    changes: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    unmasked: bool = False
    alone: bool = False

    @property
    def name(self) -> str:
        """Unique, for pytest."""
        return f"{self.architecture}{'-' * bool(self.note)}{self.note.replace(' ', '_')}"

    @property
    def output(self) -> str:
        """What the engine gives by default."""
        for suffix, output in _OUTPUTS.items():
            if self.architecture.endswith(suffix):
                return output
        return "embedding"


_OUTPUTS = {
    "ForSequenceClassification": "logits",
    "ForTokenClassification": "token_logits",
    "ForMaskedLM": "sparse",
}

_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_TOKENS,
}
_ROBERTA = {**_ENCODER, "max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1, "type_vocab_size": 1}
_DISTILBERT = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": MAX_TOKENS}
_MPNET = {**_ENCODER, "max_position_embeddings": MAX_TOKENS + 2}
_ELECTRA = {**_ENCODER, "embedding_size": 16}
_DEBERTA = {
    **_ENCODER,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": 32,
    "pooler_hidden_act": "gelu",
}
_MODERN = {**_ENCODER, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2, "pad_token_id": 0}
_NOMIC = {**_ENCODER, "type_vocab_size": 2}
_GTE = {**_ENCODER, "type_vocab_size": 1}
_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 1,
}
_NO_HEAD_DIM = {key: value for key, value in _DECODER.items() if key != "head_dim"}
_WINDOWED = {**_DECODER, "sliding_window": WINDOW}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_GEMMA2 = {**_WINDOWED, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "attention_bias": True}
_GEMMA3 = {**_WINDOWED, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


_LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_TOKENS // 2
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=MAX_TOKENS // 4)


def _phi3_rope(rotary: int) -> dict[str, Any]:
    half = rotary // 2
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0 + 0.1 * i for i in range(half)],
            "long_factor": [2.0 + 0.3 * i for i in range(half)],
            "original_max_position_embeddings": MAX_TOKENS // 2,
        },
        "original_max_position_embeddings": MAX_TOKENS // 2,
    }


def _of(family: str, prefix: str, settings: dict[str, Any], suffixes: Sequence[str], tokenizer: Any) -> list[Case]:
    labels = {"ForSequenceClassification": {"num_labels": 3}, "ForTokenClassification": {"num_labels": 5}}
    return [Case(family, prefix + suffix, {**settings, **labels.get(suffix, {})}, tokenizer) for suffix in suffixes]


_ALL = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
_NO_LM = _ALL[:3]
_DECODERS = ("Model", "ForCausalLM", "ForSequenceClassification")

CASES: tuple[Case, ...] = (
    *_of("BERT", "Bert", _ENCODER, _ALL, wordpiece_tokenizer),
    Case("BERT", "BertForSequenceClassification", {**_ENCODER, "num_labels": 1}, note="one label"),
    *_of("RoBERTa", "Roberta", _ROBERTA, _ALL, bpe_tokenizer),
    *_of("XLM-RoBERTa", "XLMRoberta", _ROBERTA, _ALL, unigram_tokenizer),
    *_of("CamemBERT", "Camembert", _ROBERTA, _ALL, unigram_tokenizer),
    *_of("DistilBERT", "DistilBert", _DISTILBERT, _ALL, wordpiece_tokenizer),
    *_of("MPNet", "MPNet", _MPNET, _ALL, wordpiece_tokenizer),
    *_of("ELECTRA", "Electra", _ELECTRA, _NO_LM, wordpiece_tokenizer),
    *_of("DeBERTa-v2/v3", "DebertaV2", _DEBERTA, _NO_LM, wordpiece_tokenizer),
    Case(
        "DeBERTa-v2/v3",
        "DebertaV2Model",
        {
            **_DEBERTA,
            "share_att_key": False,
            "position_buckets": -1,
            "position_biased_input": True,
            "type_vocab_size": 2,
        },
        note="own position projections",
    ),
    *_of("ModernBERT", "ModernBert", _MODERN, _ALL, wordpiece_tokenizer),
    Case(
        "ModernBERT",
        "ModernBertForSequenceClassification",
        {
            **_MODERN,
            "num_labels": 1,
            "classifier_pooling": "mean",
            "norm_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
        },
        note="mean pooling and biases",
    ),
    *_of("NomicBERT", "NomicBert", _NOMIC, _NO_LM, wordpiece_tokenizer),
    *_of("GTE", "Gte", _GTE, _NO_LM, unigram_tokenizer),
    *_of("Llama", "Llama", _DECODER, _DECODERS, bpe_tokenizer),
    Case(
        "Llama",
        "LlamaModel",
        {**_DECODER, **_LLAMA3, "attention_bias": True, "mlp_bias": True},
        bpe_tokenizer,
        note="llama3 rope and biases",
    ),
    Case("Llama", "LlamaModel", {**_DECODER, **_YARN}, bpe_tokenizer, note="yarn rope"),
    Case("Llama", "LlamaModel", {**_DECODER, **_rope("linear", factor=4.0)}, bpe_tokenizer, note="linear rope"),
    Case("Llama", "LlamaModel", {**_DECODER, **_rope("dynamic", factor=4.0)}, bpe_tokenizer, note="dynamic rope"),
    Case(
        "Llama",
        "LlamaModel",
        _DECODER,
        bpe_tokenizer,
        changes={"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"},
        note="bidirectional",
        unmasked=True,
    ),
    *_of("Mistral", "Mistral", _WINDOWED, _DECODERS, bpe_tokenizer),
    *_of("Qwen2", "Qwen2", {**_NO_HEAD_DIM, **_QWEN_WINDOW}, _DECODERS, bpe_tokenizer),
    Case(
        "Qwen2",
        "Qwen2ForCausalLM",
        _NO_HEAD_DIM,
        bpe_tokenizer,
        changes={"is_causal": False},
        note="bidirectional",
        unmasked=True,
    ),
    *_of("Qwen3", "Qwen3", {**_DECODER, "tie_word_embeddings": True}, _DECODERS, bpe_tokenizer),
    *(
        replace(case, alone=True)
        for case in _of("Phi-3", "Phi3", {**_NO_HEAD_DIM, **_phi3_rope(8)}, _DECODERS, bpe_tokenizer)
    ),
    *_of("Gemma 2", "Gemma2", _GEMMA2, _DECODERS, bpe_tokenizer),
    *_of("Gemma 3 text", "Gemma3", _GEMMA3, ("ForCausalLM",), bpe_tokenizer),
    Case("Gemma 3 text", "Gemma3TextModel", _GEMMA3, bpe_tokenizer),
    Case(
        "Gemma 3 text",
        "Gemma3TextModel",
        {**_GEMMA3, "use_bidirectional_attention": True},
        bpe_tokenizer,
        note="bidirectional",
    ),
    Case("Gemma 3 text", "Gemma3TextForSequenceClassification", {**_GEMMA3, "num_labels": 2}, bpe_tokenizer),
)


def save_case(folder: Path, case: Case, **settings: Any) -> Path:
    """Save the random checkpoint of ``case`` into ``folder`` as ``save_pretrained`` does; returns ``folder``."""
    tokenizer = case.tokenizer()
    model_class = getattr(transformers, case.architecture)
    config = model_class.config_class(**{"vocab_size": tokenizer.get_vocab_size(), **case.settings, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = model_class(config)
        spread = 0.2 if config.hidden_size < 256 else 0.05
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=spread)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return change_config(folder, **case.changes) if case.changes else folder


def hf_outputs(folder: Path, case: Case, encodings: Sequence[Encoding]) -> list[Float32Array]:
    """What the HF class gives for each of ``encodings``, all in one padded batch, FP32.

    Embeddings are the token states, [tokens, hidden]: pooling is the caller's.
    """
    model_class = getattr(transformers, case.architecture)
    config = model_class.config_class.from_dict(
        {**transformers.PreTrainedConfig.get_config_dict(folder)[0], "model_type": model_class.config_class.model_type}
    )
    model = model_class.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    if case.alone and len(encodings) > 1:
        return [row for encoding in encodings for row in hf_outputs(folder, case, [encoding])]
    ids, mask = _padded(encodings, model.config.pad_token_id or 0)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if case.unmasked:
        inputs["attention_mask"] = torch.where(mask[:, None, None, :] > 0, 0.0, -1e9).expand(-1, 1, ids.shape[1], -1)
    if model.config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        # These count positions over ids that are not padding; random ids may be, so say the positions.
        inputs["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape) + 2
    if case.output == "logits" and hasattr(model, "score"):
        return [_score(model, encoding, inputs) for encoding in encodings]
    with torch.no_grad():
        if case.output == "embedding":
            states = (
                getattr(model, "model", model)(**inputs).last_hidden_state
                if case.architecture.endswith("CausalLM")
                else model(**inputs).last_hidden_state
            )
            return [states[i, : e.num_tokens].numpy() for i, e in enumerate(encodings)]
        logits = model(**inputs).logits
    if case.output == "logits":
        return list(logits.numpy())
    rows = [logits[i, : e.num_tokens] for i, e in enumerate(encodings)]
    if case.output == "sparse":
        rows = [torch.log1p(torch.relu(row)).max(0).values for row in rows]
    return [row.numpy() for row in rows]


def _score(model: Any, encoding: Encoding, inputs: dict[str, Any]) -> Float32Array:
    """One at a time: HF finds the last token by the padding id, which random ids may hold."""
    ids = torch.from_numpy(encoding.input_ids.astype(np.int64))[None]
    with torch.no_grad():
        states = model.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        row: Float32Array = model.score(states[0, -1]).numpy()
    return row


def _padded(encodings: Sequence[Encoding], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(encoding.num_tokens for encoding in encodings)
    ids = np.full((len(encodings), width), pad, np.int64)
    mask = np.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        ids[row, : encoding.num_tokens] = encoding.input_ids
        mask[row, : encoding.num_tokens] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
