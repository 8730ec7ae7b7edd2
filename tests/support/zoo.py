"""The supported models, one case a structural feature: tiny random checkpoints of the Hugging Face classes.

Every row of docs/models.md is a case here. Sizes are small and every feature is on: grouped heads, a head width that
is not hidden / heads, biases, windows shorter than the texts, soft caps, norms of queries and keys, scaled rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from bei_build.families.table import family_of
from bei_build.spec.model_spec import ModelSpec
from tests.support.builds import random_encodings
from tests.support.checkpoints import (
    bpe_tokenizer,
    change_config,
    save_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
)

MAX_TOKENS = 48
WINDOW = 8

Settings: TypeAlias = dict[str, Any]
TokenizerOf: TypeAlias = Callable[[], Tokenizer]

# These multiply by one more than the weight of a norm.
_ONE_MORE = ("Gemma", "Nemotron")


@dataclass(frozen=True)
class Case:
    """One checkpoint. ``architecture`` is the HF class; ``saved_as`` another name that its config.json gets.

    ``settings`` configure the class, ``changes`` are written into config.json afterwards (keys of remote code).
    ``note`` says what is special, beside what the family is known for. ``stored``: the type of the saved weights.
    ``unmasked``: a decoder whose tokens see each other, although its class would mask them. ``alone``: the HF class
    gives a text other outputs in a batch with longer ones (LongRoPE), or takes no batch of such texts (BART's, which
    counts ends of sentences), so it is asked one by one. ``ends_in``: the last ids of every text. ``vector``: the class
    pools itself; its output of that name, and how.
    """

    family: str
    architecture: str
    settings: Settings
    tokenizer: TokenizerOf = wordpiece_tokenizer
    changes: Settings = field(default_factory=dict)
    note: str = ""
    stored: torch.dtype = torch.float32
    unmasked: bool = False
    alone: bool = False
    ends_in: tuple[int, ...] = ()
    vector: tuple[str, str] | None = None

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


_OUTPUTS = {"ForSequenceClassification": "logits", "ForTokenClassification": "token_logits", "ForMaskedLM": "sparse"}
_NUM_LABELS = {"ForSequenceClassification": 3, "ForTokenClassification": 5}

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
# Random ids of texts have mask tokens among them.
_ESM = {
    **_ENCODER,
    "max_position_embeddings": MAX_TOKENS + 2,
    "pad_token_id": 1,
    "mask_token_id": 4,
    "position_embedding_type": "rotary",
    "token_dropout": True,
}
_REMBERT = {**_ENCODER, "input_embedding_size": 16, "output_embedding_size": 40}
# Of block_sparse attention, texts that are short enough for it to be the full one.
_BIG_BIRD = {**_ENCODER, "attention_type": "block_sparse", "rescale_embeddings": True}
# Of three layers two share their weights.
_ALBERT = {**_ELECTRA, "num_hidden_groups": 2}
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
_DEBERTA_V1 = {
    **_ENCODER,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_CLIP = {**_ENCODER, "projection_dim": 24, "hidden_act": "quick_gelu", "eos_token_id": 9}
_T5 = {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "scale_embedding": True,
}
_MODERN = {
    **_ENCODER,
    "local_attention": 2 * WINDOW,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 2),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
}
_MODERN_BIASES = {"norm_bias": True, "mlp_bias": True, "attention_bias": True}
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
_GRANITE = {
    **_DECODER,
    "attention_bias": True,
    "mlp_bias": True,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_LFM2 = {**_NO_HEAD_DIM, "block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"]}
_GEMMA2 = {**_WINDOWED, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "attention_bias": True}
_GEMMA3 = {**_WINDOWED, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}


# Layers that see everything have wider heads, and fewer keys.
_EMBEDDING_GEMMA2 = {
    **_WINDOWED,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 20,
    "embedding_dim": 24,
    "attention_bias": True,
}
_GPT_NEO = {
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_TOKENS,
    "window_size": WINDOW,
    "attention_types": [[["global", "local", "global"], 1]],
    "pad_token_id": 1,
}
_GPTJ = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": MAX_TOKENS,
    "rotary_dim": 4,
    "pad_token_id": 1,
}
_OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": MAX_TOKENS,
}


def _rope(kind: str, **parameters: Any) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


_LLAMA3 = _rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_TOKENS // 2
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=MAX_TOKENS // 4)
_MINISTRAL3_ROPE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=MAX_TOKENS,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)

# As Gemma 3's larger models: the layers that see everything turn slower.
_GEMMA3_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    }
}


_HALF_ROPE = _rope("default", partial_rotary_factor=0.5)

# As OLMo 3: the layers with windows turn unscaled.
_OLMO3_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": _YARN["rope_parameters"],
    }
}


def _phi3_rope(rotary: int) -> Settings:
    """LongRoPE of heads of which ``rotary`` components turn, long from half of the longest text."""
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
        "eos_token_id": 2,
    }


def qwen_tokenizer() -> Tokenizer:
    """With the token that Qwen2's class adds, whatever class its files name."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _of(
    family: str, prefix: str, settings: Settings, suffixes: Sequence[str], tokenizer: TokenizerOf, **fields: Any
) -> list[Case]:
    """A case for each class of a family: ``prefix`` and one of ``suffixes``."""
    labels = {suffix: {"num_labels": count} for suffix, count in _NUM_LABELS.items()}
    return [
        Case(family, prefix + suffix, {**settings, **labels.get(suffix, {})}, tokenizer, **fields)
        for suffix in suffixes
    ]


_ALL = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")
_NO_LM = _ALL[:3]
_DECODERS = ("Model", "ForCausalLM", "ForSequenceClassification")
_DECODERS_AND_TOKENS = (*_DECODERS, "ForTokenClassification")

CASES: tuple[Case, ...] = (
    *_of("BERT", "Bert", _ENCODER, _ALL, wordpiece_tokenizer),
    Case("BERT", "BertForSequenceClassification", {**_ENCODER, "num_labels": 1}, note="one label"),
    Case("BERT", "BertForMaskedLM", {**_ENCODER, "tie_word_embeddings": False}, note="untied decoder"),
    *_of("RoBERTa", "Roberta", _ROBERTA, _ALL, bpe_tokenizer),
    *_of("XLM-RoBERTa", "XLMRoberta", _ROBERTA, _ALL, unigram_tokenizer),
    *_of("Jina v3", "JinaEmbeddingsV3", {**_ROBERTA, **_rope("default")}, _ALL, unigram_tokenizer),
    *_of("CamemBERT", "Camembert", _ROBERTA, _ALL, unigram_tokenizer),
    *_of("data2vec", "Data2VecText", _ROBERTA, _ALL, bpe_tokenizer),
    *_of("XLM-RoBERTa XL", "XLMRobertaXL", _ROBERTA, _ALL, unigram_tokenizer),
    *_of("RoBERTa-PreLayerNorm", "RobertaPreLayerNorm", _ROBERTA, _ALL, bpe_tokenizer),
    *_of("LUKE", "Luke", {**_ROBERTA, "entity_vocab_size": 8, "entity_emb_size": 16}, _ALL, bpe_tokenizer),
    *_of("ERNIE", "Ernie", {**_ENCODER, "use_task_id": True, "task_type_vocab_size": 3}, _ALL, wordpiece_tokenizer),
    Case("ERNIE", "ErnieModel", {**_ENCODER, "use_task_id": False}, note="no kinds of tasks"),
    *_of("Megatron-BERT", "MegatronBert", _ENCODER, _ALL, wordpiece_tokenizer),
    *_of("RemBERT", "RemBert", _REMBERT, _ALL, unigram_tokenizer),
    *_of("RoFormer", "RoFormer", {**_ELECTRA, "type_vocab_size": 2}, _ALL, wordpiece_tokenizer),
    *_of("ESM", "Esm", _ESM, _ALL, bpe_tokenizer),
    Case(
        "ESM",
        "EsmModel",
        {**_ESM, "position_embedding_type": "absolute", "emb_layer_norm_before": True, "token_dropout": False},
        bpe_tokenizer,
        note="learned positions",
    ),
    *_of("BigBird", "BigBird", _BIG_BIRD, _ALL, unigram_tokenizer),
    Case(
        "BigBird",
        "BigBirdModel",
        {**_BIG_BIRD, "attention_type": "original_full", "use_bias": False, "rescale_embeddings": False},
        unigram_tokenizer,
        note="full attention, no biases",
    ),
    Case("DPR", "DPRQuestionEncoder", {**_ENCODER, "projection_dim": 0}, vector=("pooler_output", "cls")),
    Case("DPR", "DPRContextEncoder", {**_ENCODER, "projection_dim": 24}, vector=("pooler_output", "cls")),
    *_of("DistilBERT", "DistilBert", _DISTILBERT, _ALL, wordpiece_tokenizer),
    *_of("MPNet", "MPNet", _MPNET, _ALL, bpe_tokenizer),
    *_of("ELECTRA", "Electra", _ELECTRA, _ALL, wordpiece_tokenizer),
    Case("ELECTRA", "ElectraModel", {**_ELECTRA, "embedding_size": 32}, note="embeddings as wide as the layers"),
    *_of("ALBERT", "Albert", _ALBERT, _ALL, wordpiece_tokenizer),
    *_of("DeBERTa-v2/v3", "DebertaV2", _DEBERTA, _ALL, wordpiece_tokenizer),
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
    Case("DeBERTa-v2/v3", "DebertaV2Model", {**_DEBERTA, "pos_att_type": ["c2p"]}, note="content to position only"),
    Case(
        "DeBERTa-v2/v3",
        "DebertaV2Model",
        {**_DEBERTA, "pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"},
        note="position to content only",
    ),
    Case(
        "DeBERTa-v2/v3",
        "DebertaV2Model",
        {**_DEBERTA, "conv_kernel_size": 5, "conv_act": "gelu"},
        note="convolution",
    ),
    Case("DeBERTa-v2/v3", "DebertaV2ForMaskedLM", {**_DEBERTA, "legacy": False}, note="not legacy"),
    *_of("DeBERTa", "Deberta", _DEBERTA_V1, _ALL, bpe_tokenizer),
    Case(
        "DeBERTa",
        "DebertaModel",
        {**_DEBERTA_V1, "pos_att_type": ["c2p"], "max_relative_positions": 12, "position_biased_input": True},
        bpe_tokenizer,
        note="content to position only, short distances",
    ),
    Case(
        "CLIP text",
        "CLIPTextModelWithProjection",
        _CLIP,
        bpe_tokenizer,
        ends_in=(9,),
        vector=("text_embeds", "first_marked"),
    ),
    Case("CLIP text", "CLIPTextModel", _CLIP, bpe_tokenizer, ends_in=(9,), vector=("pooler_output", "first_marked")),
    Case(
        "CLIP text",
        "CLIPTextModelWithProjection",
        {**_CLIP, "eos_token_id": 2, "hidden_act": "gelu"},
        bpe_tokenizer,
        note="end of text by the largest id",
        vector=("text_embeds", "largest_id"),
    ),
    *_of("T5 encoder", "T5", _T5, ("EncoderModel",), unigram_tokenizer),
    Case("T5 encoder", "T5EncoderModel", {**_T5, "feed_forward_proj": "gated-gelu"}, unigram_tokenizer, note="gated"),
    Case("mT5 encoder", "MT5EncoderModel", {**_T5, "feed_forward_proj": "gated-gelu"}, unigram_tokenizer),
    *_of("BART", "Bart", _BART, _NO_LM[:2], bpe_tokenizer, alone=True, ends_in=(2,)),
    *_of(
        "mBART", "MBart", _BART, ("Model", "ForSequenceClassification"), unigram_tokenizer, alone=True, ends_in=(2, 4)
    ),
    *_of("ModernBERT", "ModernBert", _MODERN, _ALL, wordpiece_tokenizer),
    Case(
        "ModernBERT",
        "ModernBertForSequenceClassification",
        {**_MODERN, **_MODERN_BIASES, "num_labels": 1, "classifier_pooling": "mean"},
        note="mean pooling and biases",
    ),
    *_of("ModernBERT decoder", "ModernBertDecoder", _MODERN, _DECODERS, wordpiece_tokenizer),
    Case(
        "ModernBERT decoder",
        "ModernBertDecoderForSequenceClassification",
        {**_MODERN, **_MODERN_BIASES, "classifier_bias": True, "num_labels": 1},
        note="biases",
    ),
    *_of("EuroBERT", "EuroBert", _DECODER, _ALL, bpe_tokenizer),
    Case(
        "EuroBERT",
        "EuroBertForSequenceClassification",
        {**_DECODER, "num_labels": 2, "classifier_pooling": "mean", "attention_bias": True},
        bpe_tokenizer,
        note="mean pooling before the classifier",
    ),
    *_of("NomicBERT", "NomicBert", _NOMIC, _ALL, wordpiece_tokenizer),
    *_of("GTE", "Gte", _GTE, _ALL, unigram_tokenizer),
    Case("GTE", "GteModel", {**_GTE, "type_vocab_size": 0}, unigram_tokenizer, note="no token types"),
    *_of("Llama", "Llama", _DECODER, _DECODERS_AND_TOKENS, bpe_tokenizer),
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
    Case("Llama", "LlamaModel", _DECODER, bpe_tokenizer, note="stored in float16", stored=torch.float16),
    Case("Llama", "LlamaModel", _DECODER, bpe_tokenizer, note="stored in bfloat16", stored=torch.bfloat16),
    *_of("Mistral", "Mistral", _WINDOWED, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("Ministral", "Ministral", {**_WINDOWED, **_LAYER_TYPES}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("Ministral 3", "Ministral3", {**_DECODER, **_MINISTRAL3_ROPE}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    Case(
        "Ministral 3",
        "Ministral3Model",
        {**_DECODER, **_MINISTRAL3_ROPE},
        bpe_tokenizer,
        changes={"is_causal": False},
        note="bidirectional",
        unmasked=True,
    ),
    *_of("Qwen2", "Qwen2", {**_NO_HEAD_DIM, **_QWEN_WINDOW}, _DECODERS_AND_TOKENS, qwen_tokenizer),
    Case(
        "Qwen2",
        "Qwen2ForCausalLM",
        _NO_HEAD_DIM,
        qwen_tokenizer,
        changes={"is_causal": False},
        note="bidirectional",
        unmasked=True,
    ),
    *_of("Qwen3", "Qwen3", {**_DECODER, "tie_word_embeddings": True}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    Case("Qwen3", "Qwen3Model", {**_DECODER, "attention_bias": True}, bpe_tokenizer, note="biases"),
    Case("Qwen3", "Qwen3ForSequenceClassification", {**_DECODER, "num_labels": 1}, bpe_tokenizer, note="one label"),
    *_of("Phi", "Phi", {**_NO_HEAD_DIM, **_HALF_ROPE}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    Case("Phi", "PhiModel", {**_NO_HEAD_DIM, **_HALF_ROPE, "qk_layernorm": True}, bpe_tokenizer, note="norms of heads"),
    *_of("Phi-3", "Phi3", {**_NO_HEAD_DIM, **_phi3_rope(8)}, _DECODERS_AND_TOKENS, bpe_tokenizer, alone=True),
    Case(
        "Phi-3",
        "Phi3Model",
        {**_NO_HEAD_DIM, **_rope("default", partial_rotary_factor=0.5), "sliding_window": WINDOW},
        bpe_tokenizer,
        note="partial rotation and window",
    ),
    *_of("OLMo", "Olmo", {**_NO_HEAD_DIM, "attention_bias": True, "clip_qkv": 0.5}, _DECODERS, bpe_tokenizer),
    *_of("OLMo 2", "Olmo2", {**_NO_HEAD_DIM, "attention_bias": True}, _DECODERS, bpe_tokenizer),
    *_of(
        "OLMo 3",
        "Olmo3",
        {**_NO_HEAD_DIM, "sliding_window": WINDOW, **_LAYER_TYPES, **_OLMO3_ROPE},
        _DECODERS,
        bpe_tokenizer,
    ),
    *_of("Granite", "Granite", _GRANITE, _DECODERS[:2], bpe_tokenizer),
    *_of("Gemma", "Gemma", {**_DECODER, "attention_bias": True}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("Gemma 2", "Gemma2", _GEMMA2, _DECODERS_AND_TOKENS, bpe_tokenizer),
    Case("Gemma 2", "Gemma2Model", {**_GEMMA2, "attn_logit_softcapping": None}, bpe_tokenizer, note="no soft cap"),
    *_of("Gemma 3 text", "Gemma3", _GEMMA3, ("ForCausalLM",), bpe_tokenizer),
    Case("Gemma 3 text", "Gemma3TextModel", _GEMMA3, bpe_tokenizer),
    Case(
        "Gemma 3 text",
        "Gemma3TextModel",
        {**_GEMMA3, "use_bidirectional_attention": True},
        bpe_tokenizer,
        note="bidirectional",
    ),
    Case("Gemma 3 text", "Gemma3TextModel", {**_GEMMA3, **_GEMMA3_ROPE}, bpe_tokenizer, note="scaled global rope"),
    Case(
        "Gemma 3 text",
        "Gemma3TextModel",
        {**_GEMMA3, **_GEMMA3_ROPE, "use_bidirectional_attention": True},
        bpe_tokenizer,
        note="bidirectional with a scaled global rope",
    ),
    Case("Gemma 3 text", "Gemma3TextForSequenceClassification", {**_GEMMA3, "num_labels": 2}, bpe_tokenizer),
    Case("EmbeddingGemma 2", "EmbeddingGemma2TextModel", _EMBEDDING_GEMMA2, bpe_tokenizer),
    *_of(
        "Cohere", "Cohere", {**_NO_HEAD_DIM, "attention_bias": True, "logit_scale": 0.5}, _DECODERS[:2], bpe_tokenizer
    ),
    *_of(
        "Cohere2",
        "Cohere2",
        {**_NO_HEAD_DIM, "sliding_window": WINDOW, **_LAYER_TYPES, "attention_bias": True},
        _DECODERS[:2],
        bpe_tokenizer,
    ),
    *_of(
        "SmolLM3", "SmolLM3", {**_DECODER, **_BIASED, "no_rope_layer_interval": 2}, _DECODERS_AND_TOKENS, bpe_tokenizer
    ),
    Case(
        "SmolLM3",
        "SmolLM3Model",
        {**_WINDOWED, "use_sliding_window": True, "no_rope_layer_interval": 2},
        bpe_tokenizer,
        note="windows",
    ),
    *_of("StarCoder2", "Starcoder2", {**_NO_HEAD_DIM, "sliding_window": WINDOW}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("GLM", "Glm", {**_DECODER, **_HALF_ROPE, "head_dim": 16}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("GLM-4", "Glm4", {**_DECODER, **_HALF_ROPE, "head_dim": 16}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("EXAONE 4", "Exaone4", {**_WINDOWED, "sliding_window_pattern": 2}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    Case(
        "EXAONE 4",
        "Exaone4Model",
        {**_DECODER, "sliding_window": None, "layer_types": ["full_attention"] * 3},
        bpe_tokenizer,
        note="no windows",
    ),
    *_of("Helium", "Helium", {**_NO_HEAD_DIM, **_BIASED, "head_dim": 8}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("LFM2", "Lfm2", _LFM2, _DECODERS[:2], bpe_tokenizer),
    Case("LFM2", "Lfm2Model", {**_LFM2, "conv_bias": True, "conv_L_cache": 4}, bpe_tokenizer, note="biases"),
    *_of(
        "StableLM",
        "StableLm",
        {**_NO_HEAD_DIM, **_HALF_ROPE, "use_qkv_bias": True},
        _DECODERS_AND_TOKENS,
        bpe_tokenizer,
    ),
    Case(
        "StableLM",
        "StableLmModel",
        {**_NO_HEAD_DIM, **_HALF_ROPE, "use_parallel_residual": True},
        bpe_tokenizer,
        note="parallel",
    ),
    *_of("Nemotron", "Nemotron", {**_DECODER, **_HALF_ROPE, **_BIASED}, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("GPT-Neo", "GPTNeo", _GPT_NEO, _DECODERS_AND_TOKENS, bpe_tokenizer),
    *_of("GPT-J", "GPTJ", _GPTJ, _DECODERS, bpe_tokenizer),
    *_of("OPT", "OPT", _OPT, _DECODERS, bpe_tokenizer),
    Case("OPT", "OPTModel", {**_OPT, "do_layer_norm_before": False}, bpe_tokenizer, note="norms behind"),
)


FIRST_OF_FAMILY: tuple[Case, ...] = tuple({case.family: case for case in reversed(CASES)}.values())[::-1]


# Those that say what is special about them.
SPECIAL: tuple[Case, ...] = tuple(case for case in CASES if case.note)


def by_tier(*first: Case) -> list[Any]:
    """Parameters of a test that asks every case, ``first`` in the first tier and the others in the second: what these
    compute is in a class of their family or in a special case too."""
    return [pytest.param(case, id=case.name, marks=() if case in first else pytest.mark.slow) for case in CASES]


def config_of(case: Case) -> Any:
    """The HF config of ``case`` as its config.json will say it, ``changes`` included."""
    config_class = getattr(transformers, case.architecture).config_class
    config = config_class(**{"vocab_size": case.tokenizer().get_vocab_size(), **case.settings})
    for key in case.changes.keys() - {"model_type"}:  # the class has its own
        setattr(config, key, case.changes[key])
    return config


def spec_of(case: Case) -> ModelSpec:
    """What the family reads of the config of ``case``; its heads are not chosen."""
    config = config_of(case)
    (architecture,) = case.changes.get("architectures", [case.architecture])
    return family_of(config.model_type, architecture, config.to_dict()).spec_from_config(config, architecture)


def encodings_of(case: Case, lengths: Sequence[int], vocab_size: int) -> list[Encoding]:
    """Random ids of ``lengths``, with padding at the start, inside and at the end as if somebody had written it; ended
    as ``case`` says."""
    encodings = random_encodings(lengths, vocab_size)
    padding = case.settings.get("pad_token_id")
    for encoding in encodings:
        ids = encoding.input_ids
        if padding is not None and len(ids) > 8:
            ids[[0, 4, 5]] = padding
            ids[-2:] = padding if len(ids) % 2 else ids[-2:]
        if case.ends_in:
            start = max(0, len(ids) - len(case.ends_in))
            ids[start:] = case.ends_in[: len(ids) - start]
    return encodings


def widened(case: Case, width: int, layers: int) -> Case:
    """``case`` with realistic sizes: hidden states of ``width``, heads of 64. The vocabulary stays small."""
    heads = width // 64
    sizes = {
        **dict.fromkeys(("hidden_size", "dim", "pooler_hidden_size", "d_model", "n_embd"), width),
        **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "n_layer"), layers),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "n_head"), heads),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
        **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "ffn_dim", "n_inner"), 3 * width),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3 * width),
        "layer_types": (case.settings.get("layer_types", []) * layers)[:layers],
        "attention_types": [[["global", "local"], layers // 2]],
        "num_key_value_heads": max(1, heads // 4),
        **dict.fromkeys(("head_dim", "d_kv"), 64),
        "embedding_size": width // 2 if case.settings.get("embedding_size", 0) < 32 else width,
        **(_phi3_rope(64) if "short_factor" in case.settings.get("rope_parameters", {}) else {}),
    }
    settings = {key: sizes.get(key, value) for key, value in case.settings.items()}
    return replace(case, settings=settings)


def save_case(folder: Path, case: Case) -> Path:
    """Save the random checkpoint of ``case`` into ``folder`` as ``save_pretrained`` does; returns ``folder``."""
    tokenizer = case.tokenizer()
    model_class = getattr(transformers, case.architecture)
    config = model_class.config_class(**{"vocab_size": tokenizer.get_vocab_size(), **case.settings})
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # sines
                continue
            # Wide matrices have smaller weights, or sums would grow from layer to layer.
            spread = 0.2 if parameter.ndim == 1 else min(0.2, parameter.shape[-1] ** -0.5)
            if (
                parameter.ndim == 3 and parameter.shape[1] == 1
            ):  # a kernel's few factors keep the size of what they read
                spread = parameter.shape[-1] ** -0.5
            if name.endswith("SelfAttention.q.weight"):  # T5 scales no scores: trained weights of queries are smaller
                spread *= config.d_kv**-0.5
            module = name.split(".")[-2].lower()
            is_norm = ("norm" in module or module == "ln") and name.endswith("weight")
            mean = 1.0 if is_norm and not case.family.startswith(_ONE_MORE) else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=spread)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # EmbeddingGemma 2's, which are stored
                buffer.fill_(0.8)
    model.to(case.stored).save_pretrained(folder)
    save_tokenizer(folder, tokenizer)
    return change_config(folder, **case.changes) if case.changes else folder


def hf_outputs(
    folder: Path, case: Case, encodings: Sequence[Encoding], dtype: torch.dtype = torch.float32
) -> list[Float32Array]:
    """What the HF class, computing in ``dtype``, gives for each of ``encodings``, all in one padded batch.

    Logits are [labels], token logits [tokens, labels], sparse vectors [vocabulary]. Embeddings are the token states,
    [tokens, hidden]: pooling is the caller's.
    """
    model = load_case(folder, case).to(dtype)
    with torch.no_grad():
        if case.alone:
            return [_outputs(model, case, [encoding])[0].float().numpy() for encoding in encodings]
        return [rows.float().numpy() for rows in _outputs(model, case, encodings)]


def load_case(folder: Path, case: Case) -> Any:
    """The HF model, by the class itself, whatever name ``changes`` gave it."""
    model_class = getattr(transformers, case.architecture)
    config_class = model_class.config_class
    saved = transformers.PreTrainedConfig.get_config_dict(folder)[0]
    config = config_class.from_dict({**saved, "model_type": config_class.model_type})
    return model_class.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()


def _outputs(model: Any, case: Case, encodings: Sequence[Encoding]) -> list[torch.Tensor]:
    inputs = _inputs(model, case, encodings)
    lengths = [encoding.num_tokens for encoding in encodings]
    if case.vector:
        return list(model(**inputs)[case.vector[0]])
    score = _score(model) if case.unmasked or model.config.pad_token_id is None else None
    if case.output == "embedding" or (case.output == "logits" and score):
        has_head = score or case.architecture.endswith("ForCausalLM")
        states = (model.base_model if has_head else model)(**inputs).last_hidden_state
        if case.output == "logits" and score:  # the class takes no batch without a padding id, and masks by itself
            return [score(row[length - 1]) for row, length in zip(states, lengths, strict=True)]
        return [row[:length] for row, length in zip(states, lengths, strict=True)]
    logits = model(**inputs).logits
    if case.output == "logits":
        return list(logits)
    rows = [row[:length] for row, length in zip(logits, lengths, strict=True)]
    return [torch.log1p(torch.relu(row)).max(0).values for row in rows] if case.output == "sparse" else rows


def _score(model: Any) -> Any:
    """What a decoder's class makes of the last token's state; None for encoders."""
    if model.config.model_type == "modernbert-decoder" and hasattr(model, "classifier"):
        return lambda state: model.classifier(model.head(state))
    return getattr(model, "score", None)


def _inputs(model: Any, case: Case, encodings: Sequence[Encoding]) -> dict[str, torch.Tensor]:
    width = max(encoding.num_tokens for encoding in encodings)
    ids = torch.full((len(encodings), width), model.config.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for row, encoding in enumerate(encodings):
        ids[row, : encoding.num_tokens] = torch.from_numpy(encoding.input_ids)
        mask[row, : encoding.num_keys or encoding.num_tokens] = 1
    if case.unmasked:
        mask = torch.where(mask[:, None, None, :] > 0, 0.0, -1e9).expand(-1, 1, width, -1)
    return {"input_ids": ids, "attention_mask": mask}
