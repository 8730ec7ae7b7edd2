"""The repository behind each recipe of configs/, made small: class and structure, files, kind of tokenizer.

Widths are tiny. Ratios of heads, biases, tied tables, rotations, windows and the files beside the weights are the
repository's.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, processors

from tests.bei_build.families import jina, nomic
from tests.support.checkpoints import (
    MAX_TOKENS,
    Dense,
    Normalize,
    add_modules,
    add_static_modules,
    bpe_tokenizer,
    change_config,
    read_tensors,
    save_static,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
    write_tensors,
)
from tests.support.zoo import Case, save_case

# The families of the table, by the repositories it names.
FAMILY_TABLE = {
    "BERT": (
        "BAAI/bge-large-en-v1.5",
        "mixedbread-ai/mxbai-embed-large-v1",
        "Snowflake/snowflake-arctic-embed-l",
        "ncbi/MedCPT-Cross-Encoder",
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        "dslim/bert-base-NER",
        "naver/splade-v3",
    ),
    "RoBERTa, XLM-RoBERTa": (
        "BAAI/bge-m3",
        "BAAI/bge-reranker-v2-m3",
        "BAAI/bge-reranker-v2-gemma",
        "SamLowe/roberta-base-go_emotions",
        "intfloat/multilingual-e5-small",
        "intfloat/multilingual-e5-large",
    ),
    "DistilBERT": ("distilbert/distilbert-base-uncased-finetuned-sst-2-english",),
    "DeBERTa": (
        "mixedbread-ai/mxbai-rerank-base-v1",
        "mixedbread-ai/mxbai-rerank-large-v1",
        "meta-llama/Llama-Prompt-Guard-2-22M",
        "meta-llama/Llama-Prompt-Guard-2-86M",
        "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
    ),
    "ModernBERT": (
        "Alibaba-NLP/gte-modernbert-base",
        "Alibaba-NLP/gte-reranker-modernbert-base",
        "nomic-ai/modernbert-embed-base",
        "lightonai/GTE-ModernColBERT-v1",
    ),
    "NomicBERT, GTE": (
        "nomic-ai/nomic-embed-text-v1.5",
        "Alibaba-NLP/gte-multilingual-base",
        "Alibaba-NLP/gte-multilingual-reranker-base",
        "Alibaba-NLP/gte-large-en-v1.5",
    ),
    "MPNet, ELECTRA": ("sentence-transformers/all-mpnet-base-v2", "cross-encoder/ms-marco-electra-base"),
    "Mistral, Llama": (
        "BAAI/bge-en-icl",
        "Salesforce/SFR-Embedding-Mistral",
        "intfloat/e5-mistral-7b-instruct",
        "allenai/Llama-3.1-Tulu-3-8B-RM",
        "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2",
        "nvidia/llama-nemotron-embed-1b-v2",
    ),
    "Qwen": (
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        "michaelfeil/mxbai-rerank-large-v2-seq",
        "Qwen/Qwen3-Embedding-0.6B",
        "Qwen/Qwen3-Embedding-4B",
        "Qwen/Qwen3-Embedding-8B",
        "Qwen/Qwen3-Reranker-0.6B",
        "Qwen/Qwen3-Reranker-4B",
        "Qwen/Qwen3-Reranker-8B",
    ),
    "Gemma": ("BAAI/bge-multilingual-gemma2", "google/embeddinggemma-300m"),
}


@dataclass(frozen=True)
class Repository:
    """One repository, made small, and what an artifact of its recipe must say.

    ``modules`` are pooling and tail of its sentence-transformers files, ``prompts`` those of the same files.
    ``lengths`` are those of the two sides of late interaction. ``last_token`` is what every text must end in.
    ``prepare`` makes of a saved checkpoint what the repository holds, or all of it without a ``case`` (static
    embeddings have no HF class).
    """

    case: Case | None
    tasks: tuple[str, ...] = ("embed",)
    outputs: dict[str, int] = field(default_factory=lambda: {"embedding": 32})
    pooling: str | None = None
    modules: tuple[str, tuple[Dense | Normalize, ...]] | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    function: str | None = None
    last_token: str | None = None
    prepare: tuple[Callable[[Path], object], ...] = ()

    def save(self, folder: Path) -> Path:
        """Write the checkpoint into ``folder``; returns ``folder``."""
        if self.case:
            save_case(folder, self.case)
            if self.modules:
                pooling, tail = self.modules
                add_modules(folder, (pooling,), tail, hidden=self.case.settings.get("hidden_size", 32))
                write_json(folder / "config_sentence_transformers.json", {"prompts": self.prompts})
        for step in self.prepare:
            step(folder)
        return folder


# Tokenizers.


def _framed(tokenizer: Tokenizer, single: str, *tokens: str) -> Tokenizer:
    """``tokenizer`` with a post-processor of its own; tokens it does not know are added."""
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    named = [(token, tokenizer.token_to_id(token)) for token in tokens]
    pair = single.replace("$A", "$A $B:1")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    return tokenizer


def _llama() -> Tokenizer:
    return _framed(bpe_tokenizer(), "<|begin_of_text|> $A", "<|begin_of_text|>")


def _begin_only() -> Tokenizer:
    return _framed(bpe_tokenizer(), "<s> $A", "<s>")


def _plain() -> Tokenizer:
    """Qwen's: no special tokens around a text."""
    tokenizer = bpe_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>")])
    tokenizer.add_tokens(["yes", "no", "Yes", "No", "safe", "unsafe", "ĠSafe", "ĠUnsafe", "ĠCont"])
    return tokenizer


def _qwen_embedding() -> Tokenizer:
    return _framed(bpe_tokenizer(), "$A <|endoftext|>", "<|endoftext|>")


def _gemma() -> Tokenizer:
    return _framed(unigram_tokenizer(), "<bos> $A <eos>", "<bos>", "<eos>")


def _pylate() -> Tokenizer:
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    return tokenizer


def _unused() -> Tokenizer:
    """BERT's vocabulary has tokens without a use."""
    model = json.loads(wordpiece_tokenizer().to_str())
    vocabulary = model["model"]["vocab"]
    vocabulary.update({f"[unused{index}]": len(vocabulary) + index for index in range(2)})
    return Tokenizer.from_str(json.dumps(model))


# Files beside the weights.


def _asks_for_last_token(eos: str, bos: str | None = None) -> Callable[[Path], Path]:
    """A tokenizer_config.json that asks for what tokenizer.json does not add."""
    settings = {"add_bos_token": bos is not None, "add_eos_token": True, "bos_token": bos, "eos_token": eos}
    return lambda folder: write_json(folder / "tokenizer_config.json", settings)


def _linear_files(folder: Path) -> None:
    """BGE-M3's: one linear layer each, saved by torch."""
    generator = torch.Generator().manual_seed(1)
    for name, width in (("sparse_linear", 1), ("colbert_linear", 32)):
        layer = {
            "weight": torch.randn(width, 32, generator=generator) / 6,
            "bias": torch.randn(width, generator=generator) / 6,
        }
        torch.save(layer, folder / f"{name}.pt")


def _splade_modules(folder: Path) -> None:
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    prefix = "sentence_transformers.sparse_encoder.models"
    write_json(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
            for index, (path, kind) in enumerate(kinds.items())
        ],
    )
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})


def _pylate_modules(folder: Path) -> None:
    """Without pooling: the linear layer is on every token."""
    modules = json.loads((folder / "modules.json").read_text())
    del modules[1]
    modules[1].update(idx=1, name="1", type="pylate.models.Dense.Dense")
    write_json(folder / "modules.json", modules)
    # As in lightonai/GTE-ModernColBERT-v1 and LateOn-Code, whose files name the same keys.
    lengths = {"query_length": 32, "document_length": 300, "attend_to_expansion_tokens": False}
    markers = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "skiplist_words": [*string.punctuation]}
    write_json(folder / "config_sentence_transformers.json", {**markers, **lengths})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 299, "do_lower_case": False})


def _original_colbert(folder: Path) -> None:
    """A class of its own, its linear layer among the base model's weights."""
    change_config(folder, architectures=["HF_ColBERT"])
    tensors = {f"bert.{name}": tensor for name, tensor in read_tensors(folder).items()}
    generator = torch.Generator().manual_seed(2)
    write_tensors(folder, {**tensors, "linear.weight": torch.randn(12, 32, generator=generator) / 6})
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "dim": 12, "mask_punctuation": True}
    lengths = {"query_maxlen": 32, "doc_maxlen": 300, "attend_to_mask_tokens": False}
    write_json(folder / "artifact.metadata", {**markers, **lengths})


def _remote_nomic(folder: Path) -> None:
    """GPT-2's keys, as the remote code has them."""
    config = json.loads((folder / "config.json").read_text())
    width, heads, layers = (config[f"{key}"] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kept = ("architectures", "model_type", "vocab_size", "type_vocab_size")
    remote = {
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_inner": config["intermediate_size"],
        "n_positions": 4 * MAX_TOKENS,
        "max_trained_positions": MAX_TOKENS,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": 2,
        "prenorm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "use_rms_norm": False,
    }
    write_json(folder / "config.json", {**{key: config[key] for key in kept}, **remote})


def remote_gte(theta: float, factor: float, prefix: str = "", **tensors: torch.Tensor) -> Callable[[Path], None]:
    """The config keys of the remote code, ``prefix`` in front of the base model's tensors, ``tensors`` beside them."""

    def prepare(folder: Path) -> None:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        change_config(
            folder,
            model_type="new",
            architectures=[architecture.replace("Gte", "New")],
            rope_parameters=None,
            rope_theta=theta,
            rope_scaling={"type": "ntk", "factor": factor},
            position_embedding_type="rope",
            layer_norm_type="layer_norm",
            pack_qkv=True,
            logn_attention_scale=False,
        )
        saved = {name.removeprefix("gte."): tensor for name, tensor in read_tensors(folder).items()}
        heads = {name: tensor for name, tensor in saved.items() if name.startswith("classifier.")}
        base = {prefix + name: tensor for name, tensor in saved.items() if name not in heads}
        write_tensors(folder, {**base, **heads, **{name.replace("__", "."): t for name, t in tensors.items()}})

    return prepare


def _potion(folder: Path) -> None:
    save_static(folder, normalize=True)
    add_static_modules(folder, ".", "Normalize")


def _static_embedding(folder: Path) -> None:
    save_static(folder, "sentence-transformers")


# Structures.

_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
}
_XLM = {**_ENCODER, "max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1, "type_vocab_size": 1}
_DEBERTA = {
    **_ENCODER,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": 32,
    "pooler_hidden_act": "gelu",
}
_MODERN = {
    **_ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 1,
}
_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_MISTRAL = {**_DECODER, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": MAX_TOKENS}
_LLAMA3 = {
    **_DECODER,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": MAX_TOKENS // 2,
    },
}
_QWEN2_6 = {**_DECODER, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 1}
_QWEN2_7 = {**_QWEN2_6, "hidden_size": 56, "num_attention_heads": 7}
_QWEN3 = {**_DECODER, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
_QWEN3_4B = {**_QWEN3, "num_key_value_heads": 1, "head_dim": 12}
_QWEN3_8B = {**_QWEN3, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
_GEMMA2 = {
    **_DECODER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "sliding_window": MAX_TOKENS,
    "tie_word_embeddings": True,
}
_GEMMA2_PLAIN = {key: value for key, value in _GEMMA2.items() if key in (*_DECODER, "head_dim", "tie_word_embeddings")}
_GEMMA3 = {
    **_DECODER,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}

_EMBEDDINGGEMMA = {
    **_GEMMA3,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "head_dim": 20,
    "use_bidirectional_attention": True,
}

_UNIT = (Normalize(),)
_EMBEDDINGGEMMA_TAIL = (Dense(96, "Identity", bias=False), Dense(48, "Identity", bias=False), Normalize())
_REPRESENT = {"query": "Represent this sentence for searching relevant passages: "}
_QWEN3_PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    "document": "",
}
_PYLATE_PROMPTS = {"query": "[Q] ", "document": "[D] "}
_SIDES = {"query": 32, "document": 300}


def _bert(suffix: str = "Model", tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer, **settings: Any) -> Case:
    return Case("BERT", f"Bert{suffix}", {**_ENCODER, **settings}, tokenizer)


def _embedder(case: Case, pooling: str, normalize: bool = True, **more: Any) -> Repository:
    """An embedder with sentence-transformers files."""
    given = {"outputs": {"embedding": case.settings["hidden_size"]}, "modules": (pooling, _UNIT if normalize else ())}
    return Repository(case, pooling=pooling, **{**given, **more})


def _bare(case: Case, pooling: str, **more: Any) -> Repository:
    """An embedder whose recipe names the pooling."""
    return Repository(case, pooling=pooling, outputs={"embedding": case.settings["hidden_size"]}, **more)


def _reranker(case: Case, function: str = "sigmoid", **more: Any) -> Repository:
    """One label."""
    case = replace(case, settings={**case.settings, "num_labels": 1})
    return Repository(case, ("rerank", "classify"), {"logits": 1}, labels=("LABEL_0",), function=function, **more)


def _comparison(settings: dict[str, Any], architecture: str) -> Repository:
    """A language model whose scores of two tokens are compared."""
    return Repository(
        Case("", architecture, settings, _plain),
        ("rerank", "classify"),
        {"logits": 1},
        labels=("LABEL_0",),
        function="sigmoid",
    )


def _classifier(case: Case, *labels: str, function: str = "softmax", **more: Any) -> Repository:
    case = replace(case, settings={**case.settings, "id2label": dict(enumerate(labels))})
    return Repository(case, ("classify",), {"logits": len(labels)}, labels=labels, function=function, **more)


def _deberta(suffix: str = "ForSequenceClassification", **settings: Any) -> Case:
    return Case("DeBERTa", f"DebertaV2{suffix}", {**_DEBERTA, **settings}, unigram_tokenizer)


def _modern(suffix: str = "Model", **settings: Any) -> Case:
    return Case("ModernBERT", f"ModernBert{suffix}", {**_MODERN, **settings}, bpe_tokenizer)


def _xlm(suffix: str = "Model") -> Case:
    return Case("XLM-RoBERTa", f"XLMRoberta{suffix}", _XLM, unigram_tokenizer)


def _qwen3_embedding(settings: dict[str, Any]) -> Repository:
    """Tensors without the prefix of the class that config.json names."""
    case = Case("Qwen3", "Qwen3Model", settings, _qwen_embedding, {"architectures": ["Qwen3ForCausalLM"]})
    return _embedder(case, "last", prompts=_QWEN3_PROMPTS, last_token="<|endoftext|>")


def _mistral(tokenizer: Callable[[], Tokenizer] = bpe_tokenizer) -> Case:
    return Case("Mistral", "MistralModel", _MISTRAL, tokenizer)


_PYLATE = Repository(
    replace(_modern(), tokenizer=_pylate),
    ("embed_tokens",),
    {"token_embedding": 16},
    modules=("mean", (Dense(16, "Identity", bias=False),)),
    prompts=_PYLATE_PROMPTS,
    lengths=_SIDES,
    prepare=(_pylate_modules,),
)
_NEMOTRON = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}
_LOGITS = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"}}
_NER = ("O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
_EMOTIONS = tuple(f"emotion {index}" for index in range(28))

REPOSITORIES: dict[str, Repository] = {
    # BERT
    "all-minilm-l6-v2": _embedder(_bert(), "mean"),
    "bge-small-en-v1.5": _embedder(_bert(), "cls"),
    "bge-large-en-v1.5": _embedder(_bert(), "cls"),
    "mxbai-embed-large-v1": _embedder(_bert(), "cls", normalize=False),
    "snowflake-arctic-embed-l": _embedder(_bert(), "cls", prompts=_REPRESENT),
    "mdbr-leaf-ir": _embedder(
        _bert(), "mean", modules=("mean", (Dense(64, "Identity"), Normalize())), outputs={"embedding": 64}
    ),
    "medcpt-cross-encoder": _reranker(_bert("ForSequenceClassification")),
    "ms-marco-minilm-l6-v2": _reranker(replace(_bert("ForSequenceClassification"), changes=_LOGITS), "none"),
    "bert-base-ner": Repository(
        _bert("ForTokenClassification", id2label=dict(enumerate(_NER))),
        ("classify_tokens",),
        {"token_logits": 9},
        labels=_NER,
        function="softmax",
    ),
    "splade-v3": Repository(
        _bert("ForMaskedLM"),
        ("embed_sparse",),
        {"sparse": wordpiece_tokenizer().get_vocab_size()},
        prepare=(_splade_modules,),
    ),
    "paraphrase-multilingual-minilm-l12-v2": _embedder(_bert(tokenizer=unigram_tokenizer), "mean", normalize=False),
    "multilingual-e5-small": _embedder(_bert(tokenizer=unigram_tokenizer), "mean"),
    "answerai-colbert-small-v1": Repository(
        _bert(tokenizer=_unused),
        ("embed_tokens",),
        {"token_embedding": 12},
        prompts={"query": "[unused0] ", "document": "[unused1] "},
        lengths=_SIDES,
        prepare=(_original_colbert,),
    ),
    # RoBERTa, XLM-RoBERTa
    "all-distilroberta-v1": _embedder(Case("RoBERTa", "RobertaModel", _XLM, bpe_tokenizer), "mean"),
    "roberta-base-go_emotions": _classifier(
        Case(
            "RoBERTa",
            "RobertaForSequenceClassification",
            {**_XLM, "problem_type": "multi_label_classification"},
            bpe_tokenizer,
        ),
        *_EMOTIONS,
        function="sigmoid",
    ),
    "bge-m3": _embedder(
        _xlm(),
        "cls",
        tasks=("embed", "embed_sparse", "embed_tokens"),
        outputs={"embedding": 32, "token_weights": 1, "token_embedding": 32},
        prepare=(_linear_files,),
    ),
    "bge-reranker-v2-m3": _reranker(_xlm("ForSequenceClassification")),
    "multilingual-e5-large": _embedder(_xlm(), "mean"),
    "multilingual-e5-large-instruct": _embedder(_xlm(), "mean"),
    "snowflake-arctic-embed-l-v2.0": _embedder(_xlm(), "cls", prompts={"query": "query: "}),
    # DistilBERT
    "distilbert-base-uncased-finetuned-sst-2-english": _classifier(
        Case(
            "DistilBERT",
            "DistilBertForSequenceClassification",
            {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": MAX_TOKENS},
        ),
        "NEGATIVE",
        "POSITIVE",
    ),
    # DeBERTa
    "mxbai-rerank-base-v1": _reranker(_deberta()),
    "mxbai-rerank-large-v1": _reranker(_deberta(num_attention_heads=8)),
    "llama-prompt-guard-2-22m": _classifier(_deberta(num_attention_heads=2), "LABEL_0", "LABEL_1"),
    "llama-prompt-guard-2-86m": _classifier(_deberta(), "LABEL_0", "LABEL_1"),
    "deberta-v3-base-mnli-fever-anli": _classifier(_deberta(), "entailment", "neutral", "contradiction"),
    # ModernBERT
    "gte-modernbert-base": _embedder(_modern(), "cls", normalize=False),
    "gte-reranker-modernbert-base": _reranker(_modern("ForSequenceClassification", classifier_pooling="mean")),
    "modernbert-embed-base": _embedder(_modern(), "mean"),
    "granite-embedding-english-r2": _embedder(_modern(), "cls"),
    "denseon": _embedder(_modern(), "cls"),
    "gte-moderncolbert-v1": _PYLATE,
    "lateon": _PYLATE,
    # NomicBERT, GTE
    "nomic-embed-text-v1.5": _embedder(
        Case("NomicBERT", "NomicBertModel", _ENCODER), "mean", normalize=False, prepare=(_remote_nomic,)
    ),
    "nomic-embed-text-v2-moe": _embedder(
        Case("NomicBERT", "NomicBertModel", {**_ENCODER, "type_vocab_size": 1}, unigram_tokenizer),
        "mean",
        prompts={"query": "search_query: ", "passage": "search_document: "},
        prepare=(nomic.save,),
    ),
    "gte-multilingual-base": _embedder(
        Case("GTE", "GteModel", {**_ENCODER, "type_vocab_size": 1}, unigram_tokenizer),
        "cls",
        prepare=(
            remote_gte(20000.0, 8.0, "new.", classifier__weight=torch.ones(1, 32), classifier__bias=torch.ones(1)),
        ),
    ),
    "gte-multilingual-reranker-base": _reranker(
        Case("GTE", "GteForSequenceClassification", {**_ENCODER, "type_vocab_size": 1}, unigram_tokenizer),
        prepare=(remote_gte(20000.0, 8.0, "new."),),
    ),
    "gte-large-en-v1.5": _embedder(
        Case("GTE", "GteModel", {**_ENCODER, "type_vocab_size": 2}),
        "cls",
        prepare=(remote_gte(160000.0, 2.0),),
    ),
    # JinaBERT
    "jina-embeddings-v2-base-code": _bare(
        Case("JinaBERT", "BertModel", {**_ENCODER, "hidden_size": jina.HIDDEN}, bpe_tokenizer),
        "mean",
        prepare=(partial(jina.save, code=jina.CODE, tokenizer=bpe_tokenizer),),
    ),
    # MPNet, ELECTRA
    "all-mpnet-base-v2": _embedder(
        Case("MPNet", "MPNetModel", {**_ENCODER, "max_position_embeddings": MAX_TOKENS + 2}), "mean"
    ),
    "ms-marco-electra-base": _reranker(
        Case("ELECTRA", "ElectraForSequenceClassification", {**_ENCODER, "embedding_size": 32}, changes=_LOGITS), "none"
    ),
    # Mistral, Llama
    "bge-en-icl": _bare(_mistral(), "last"),
    "sfr-embedding-mistral": _bare(_mistral(), "last"),
    "linq-embed-mistral": _bare(_mistral(), "last"),
    "e5-mistral-7b-instruct": _bare(
        _mistral(_begin_only), "last", prepare=(_asks_for_last_token("</s>", "<s>"),), last_token="</s>"
    ),
    "llama-3.1-tulu-3-8b-rm": _reranker(Case("Llama", "LlamaForSequenceClassification", _LLAMA3, _llama)),
    "skywork-reward-llama-3.1-8b-v0.2": _reranker(Case("Llama", "LlamaForSequenceClassification", _LLAMA3, _llama)),
    "llama-nemotron-embed-1b-v2": _bare(
        Case("Llama", "LlamaModel", {**_LLAMA3, "tie_word_embeddings": True}, _llama, _NEMOTRON), "mean"
    ),
    "llama-embed-nemotron-8b": _bare(Case("Llama", "LlamaModel", _LLAMA3, _llama, _NEMOTRON), "mean"),
    # Qwen
    "gte-qwen2-1.5b-instruct": _bare(
        Case("Qwen2", "Qwen2ForCausalLM", _QWEN2_6, _plain, {"is_causal": False}),
        "last",
        prepare=(_asks_for_last_token("<|endoftext|>"),),
        last_token="<|endoftext|>",
    ),
    "mxbai-rerank-large-v2-seq": _reranker(Case("Qwen2", "Qwen2ForSequenceClassification", _QWEN2_6, _plain)),
    "mxbai-rerank-base-v2": _comparison({**_QWEN2_7, "tie_word_embeddings": True}, "Qwen2ForCausalLM"),
    "mxbai-rerank-large-v2": _comparison({**_QWEN2_6, "tie_word_embeddings": True}, "Qwen2ForCausalLM"),
    "qwen3-embedding-0.6b": _qwen3_embedding(_QWEN3),
    "qwen3-embedding-4b": _qwen3_embedding(_QWEN3_4B),
    "qwen3-embedding-8b": _qwen3_embedding(_QWEN3_8B),
    "harrier-oss-v1-0.6b": _embedder(Case("Qwen3", "Qwen3Model", _QWEN3, _qwen_embedding), "last"),
    "qwen3-reranker-0.6b": _comparison(_QWEN3, "Qwen3ForCausalLM"),
    "qwen3-reranker-4b": _comparison(_QWEN3_4B, "Qwen3ForCausalLM"),
    "qwen3-reranker-8b": _comparison(_QWEN3_8B, "Qwen3ForCausalLM"),
    "qwen3guard-gen-0.6b": replace(
        _comparison(_QWEN3, "Qwen3ForCausalLM"),
        tasks=("classify",),
        outputs={"logits": 3},
        labels=("safe", "unsafe", "controversial"),
        function="softmax",
    ),
    # Gemma
    "bge-reranker-v2-gemma": _comparison({**_GEMMA2_PLAIN, "attention_bias": False}, "GemmaForCausalLM"),
    "llama-guard-3-8b": replace(_comparison(_LLAMA3, "LlamaForCausalLM"), tasks=("classify",), labels=("unsafe",)),
    "shieldgemma-2b": replace(_comparison(_GEMMA2, "Gemma2ForCausalLM"), tasks=("classify",), labels=("violation",)),
    "bge-multilingual-gemma2": _bare(Case("Gemma 2", "Gemma2Model", _GEMMA2, _gemma), "last"),
    "embeddinggemma-300m": _embedder(
        Case("Gemma 3", "Gemma3TextModel", _EMBEDDINGGEMMA, _gemma),
        "mean",
        modules=("mean", _EMBEDDINGGEMMA_TAIL),
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "harrier-oss-v1-270m": _embedder(Case("Gemma 3", "Gemma3TextModel", _GEMMA3, _gemma), "last"),
    # Static embeddings
    "potion-base-8m": Repository(None, pooling="mean", prepare=(_potion,)),
    "static-retrieval-mrl-en-v1": Repository(None, pooling="mean", prepare=(_static_embedding,)),
}
