"""Rerankers, SPLADE, ColBERT, static embeddings."""

from __future__ import annotations

import json
import shutil
import string
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.bei_build.families import jina
from tests.hub_matrix import shapes, stored, tokenizers
from tests.hub_matrix.embedders import UNIT, gte, jina_states
from tests.hub_matrix.structures import Entry, Late, LayerNorm, Structure, Template
from tests.support.checkpoints import (
    Dense,
    add_static_modules,
    bpe_tokenizer,
    change_config,
    change_json,
    read_tensors,
    save_dense,
    save_static,
    unigram_tokenizer,
    write_json,
    write_tensors,
)
from tests.support.recipes import remote_gte


def reranker(hf_class: str, settings: dict[str, Any], **more: Any) -> Structure:
    """A score of one label, by its sigmoid."""
    return Structure("rerank", hf_class, settings, labels=1, **{"function": "sigmoid", **more})


# What sentence-transformers 4 writes into config.json, and what came before it.
_IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"}}
_OLD_IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}

_QWEN3_RERANKER = {
    "score_tokens": ("no", "yes"),
    "rerank_prefix": "<|im_start|>system\nAnswer yes or no.<|im_end|>\n<|im_start|>user\n",
    "rerank_body": "<Query>: {query}\n<Document>: {document}",
    "rerank_suffix": "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
}


def comparison(hf_class: str, settings: dict[str, Any], options: dict[str, Any], **more: Any) -> Structure:
    """A language model whose scores of one or two tokens count, behind a template that the user gives."""
    template = Template(
        options.get("rerank_prefix", ""),
        options["rerank_body"],
        options.get("rerank_suffix", ""),
        options["score_tokens"],
    )
    settings = {**settings, "max_position_embeddings": 1024}
    given = {"tokenizer": tokenizers.plain, "function": "sigmoid", "template": template, "options": options, **more}
    return Structure("rerank", hf_class, settings, **given)


# As zerank's: a query is what the system says, a document what the user says.
_CHATML = (
    "{% set roles = {'query': 'system', 'document': 'user'} %}"
    "{% for message in messages %}<|im_start|>{{ roles[message.role] }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _logit_score(folder: Path) -> None:
    """A CrossEncoder of a language model as sentence-transformers 5.4 and later save it."""
    modules = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", entries)
    yes = tokenizers.plain().token_to_id("Yes")
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": yes, "module_input_name": "causal_logits"})
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}, "message": message},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(folder / "sentence_bert_config.json", transformer)
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config_sentence_transformers.json", settings)
    (folder / "chat_template.jinja").write_text(_CHATML)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", tokenizer)


def _ends_in_scores(folder: Path) -> None:
    """A CrossEncoder of layers behind a pooling, as sentence-transformers 5.5 saves it."""
    places = {
        "Transformer": "base.modules.transformer",
        "Pooling": "sentence_transformer.modules.pooling",
        "Dense": "base.modules.dense",
        "LayerNorm": "sentence_transformer.modules.layer_norm",
    }
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        module["type"] = f"sentence_transformers.{places[kind]}.{kind}"
    write_json(folder / "modules.json", modules)
    pooling = {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    path = folder / modules[-1]["path"] / "config.json"
    write_json(path, {**json.loads(path.read_text()), "module_output_name": "scores"})
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write_json(folder / "config_sentence_transformers.json", settings)


def _one_label(folder: Path) -> None:
    """Of the three labels that ``jina.save`` writes the first."""
    tensors = read_tensors(folder)
    write_tensors(folder, {n: t[:1] if n.startswith("classifier.") else t for n, t in tensors.items()})


def _gemma_words() -> Tokenizer:
    """Gemma's with a word as the token that counts."""
    tokenizer = tokenizers.gemma_lm()
    tokenizer.add_tokens(["Yes"])
    return tokenizer


RERANKERS = (
    Entry(
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        reranker("BertForSequenceClassification", shapes.ENCODER, changes=_IDENTITY, function="none"),
        "sentence-transformers' key for the activation",
        (
            "cross-encoder/ms-marco-MiniLM-L12-v2",
            "cross-encoder/ms-marco-MiniLM-L4-v2",
            "cross-encoder/ms-marco-TinyBERT-L2-v2",
        ),
    ),
    Entry(
        "cross-encoder/stsb-roberta-base",
        reranker("RobertaForSequenceClassification", shapes.ROBERTA, tokenizer=bpe_tokenizer),
        "sigmoid",
        (
            "cross-encoder/stsb-roberta-large",
            "cross-encoder/stsb-distilroberta-base",
            "cross-encoder/quora-roberta-base",
        ),
    ),
    Entry(
        "cross-encoder/qnli-electra-base",
        reranker("ElectraForSequenceClassification", shapes.ELECTRA),
        "sigmoid",
        ("cross-encoder/ms-marco-electra-base",),
    ),
    Entry(
        "cross-encoder/mmarco-mMiniLMv2-L12-H384-v1",
        reranker(
            "XLMRobertaForSequenceClassification",
            shapes.ROBERTA,
            tokenizer=unigram_tokenizer,
            changes=_OLD_IDENTITY,
            function="none",
        ),
        "the key for the activation before version 4",
    ),
    Entry(
        "ncbi/MedCPT-Cross-Encoder",
        reranker("BertForSequenceClassification", shapes.ENCODER),
        "one label, no files beside it",
    ),
    Entry(
        "BAAI/bge-reranker-v2-m3",
        reranker("XLMRobertaForSequenceClassification", shapes.ROBERTA, tokenizer=unigram_tokenizer),
        "one label",
        (
            "BAAI/bge-reranker-base",
            "BAAI/bge-reranker-large",
            "maidalun1020/bce-reranker-base_v1",
            "dragonkue/bge-reranker-v2-m3-ko",
            "hotchpotch/japanese-bge-reranker-v2-m3-v1",
        ),
    ),
    Entry(
        "mixedbread-ai/mxbai-rerank-base-v1",
        reranker("DebertaV2ForSequenceClassification", shapes.DEBERTA, tokenizer=unigram_tokenizer),
        "one label",
        (
            "mixedbread-ai/mxbai-rerank-xsmall-v1",
            "mixedbread-ai/mxbai-rerank-large-v1",
            "naver/trecdl22-crossencoder-debertav3",
        ),
    ),
    Entry(
        "Alibaba-NLP/gte-reranker-modernbert-base",
        reranker(
            "ModernBertForSequenceClassification",
            {**shapes.MODERN, "classifier_pooling": "mean"},
            tokenizer=bpe_tokenizer,
        ),
        "a mean before the classifier",
        (
            "ibm-granite/granite-embedding-reranker-english-r2",
            "tomaarsen/reranker-ModernBERT-base-gooaq-bce",
        ),
    ),
    Entry(
        "cl-nagoya/ruri-v3-reranker-310m",
        reranker("ModernBertForSequenceClassification", shapes.MODERN, tokenizer=unigram_tokenizer),
        "ModernBERT with a SentencePiece tokenizer; the first token",
        ("hotchpotch/japanese-reranker-xsmall-v2",),
    ),
    Entry(
        "Alibaba-NLP/gte-multilingual-reranker-base",
        reranker(
            "GteForSequenceClassification",
            gte(20000.0, 8.0, 1),
            tokenizer=unigram_tokenizer,
            prepare=(stored.new_names, remote_gte(20000.0, 8.0, "new.")),
        ),
        "fixed NTK scaling of the remote code",
    ),
    Entry(
        "jinaai/jina-reranker-v1-turbo-en",
        Structure(
            "rerank",
            function="sigmoid",
            prepare=(
                partial(
                    jina.save,
                    prefix="bert.",
                    architectures=["JinaBertForSequenceClassification"],
                    id2label={"0": "LABEL_0"},
                ),
                _one_label,
            ),
            states=jina_states(jina.PAPERS, "bert."),
            max_tokens=jina.LONGEST,
            files={"config.json": {"model_type": "bert", "architectures": ["JinaBertForSequenceClassification"]}},
        ),
        "ALiBi, a gated MLP",
        ("jinaai/jina-reranker-v1-tiny-en",),
    ),
    Entry(
        "jinaai/jina-reranker-v2-base-multilingual",
        reranker(
            "XLMRobertaForSequenceClassification",
            shapes.ROBERTA,
            tokenizer=unigram_tokenizer,
            prepare=(stored.flash_names,),
            changes={
                "position_embedding_type": "absolute",
                "auto_map": {
                    "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
                    "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
                    "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
                },
            },
        ),
        "remote code: tensors of FlashAttention's layers",
    ),
    Entry(
        "amberoad/bert-multilingual-passage-reranking-msmarco",
        Structure("classify", "BertForSequenceClassification", shapes.ENCODER, labels=2, pairs=True),
        "two labels: served as a classifier of pairs",
        ("ibm-research/re2g-reranker-nq",),
    ),
    Entry(
        "michaelfeil/mxbai-rerank-large-v2-seq",
        reranker("Qwen2ForSequenceClassification", shapes.QWEN2_6, tokenizer=tokenizers.plain),
        "one label on the last token",
        ("michaelfeil/mxbai-rerank-base-v2-seq",),
    ),
    Entry(
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls",
        reranker("Qwen3ForSequenceClassification", shapes.QWEN3_06, tokenizer=tokenizers.plain),
        "one label on the last token",
        ("tomaarsen/Qwen3-Reranker-4B-seq-cls",),
    ),
    Entry(
        "Qwen/Qwen3-Reranker-0.6B",
        comparison("Qwen3ForCausalLM", shapes.QWEN3_06, _QWEN3_RERANKER),
        "two tokens are compared",
        ("Qwen/Qwen3-Reranker-4B",),
    ),
    Entry(
        "Qwen/Qwen3-Reranker-8B",
        comparison("Qwen3ForCausalLM", shapes.QWEN3_8, _QWEN3_RERANKER),
        "two tokens are compared, an untied table",
    ),
    Entry(
        "mixedbread-ai/mxbai-rerank-base-v2",
        comparison(
            "Qwen2ForCausalLM",
            {**shapes.QWEN2_7, "tie_word_embeddings": True},
            {"score_tokens": ("0", "1"), "rerank_body": "query: {query} \ndocument: {document} \nRelevance:"},
        ),
        "two tokens are compared",
        ("mixedbread-ai/mxbai-rerank-large-v2",),
    ),
    Entry(
        "BAAI/bge-reranker-v2-gemma",
        comparison(
            "GemmaForCausalLM",
            shapes.GEMMA1,
            {
                "score_tokens": ("Yes",),
                "rerank_prefix": "<bos>",
                "rerank_body": "A: {query}\nB: {document}\nIs B an answer?",
            },
            tokenizer=_gemma_words,
        ),
        "the score of one token",
    ),
    Entry(
        "zeroentropy/zerank-2",
        Structure(
            "rerank",
            "Qwen3ForCausalLM",
            {**shapes.QWEN3_06, "max_position_embeddings": 1024},
            tokenizers.plain,
            function="none",
            template=Template(tokens=("Yes",), chat=True),
            prepare=(_logit_score,),
        ),
        "LogitScore with one token, a chat template; raw scores",
        unsure="its files: the card says what predict() gives without code of the repository's own",
    ),
    Entry(
        "zeroentropy/zerank-1-small",
        comparison(
            "Qwen3ForCausalLM",
            shapes.QWEN3_06,
            {
                "score_tokens": ("Yes",),
                "rerank_prefix": "<|im_start|>system\n",
                "rerank_body": "{query}<|im_end|>\n<|im_start|>user\n{document}",
                "rerank_suffix": "<|im_end|>\n<|im_start|>assistant\n",
            },
            function="none",
            changes={"auto_map": {"AutoConfig": "modeling_zeranker.ZEConfig"}},
        ),
        "raw scores of one token; its own code replaces CrossEncoder.predict by the sigmoid of a fifth of them",
        ("zeroentropy/zerank-1",),
        unsure="the entry of auto_map, and whether its files have changed with zerank-2's",
    ),
    Entry(
        "nvidia/llama-nemotron-rerank-1b-v2",
        reranker(
            "LlamaForSequenceClassification",
            shapes.LLAMA3,
            tokenizer=tokenizers.llama3,
            unmasked=True,
            pooling="mean",
            changes={
                "architectures": ["LlamaBidirectionalForSequenceClassification"],
                "model_type": "llama_bidirec",
                "pooling": "avg",
                "temperature": 1.0,
            },
        ),
        "remote code: all tokens see each other; a mean before the score",
        ("nvidia/llama-3.2-nv-rerankqa-1b-v2",),
    ),
    Entry(
        "cross-encoder/ettin-reranker-150m-v1",
        Structure(
            "rerank",
            "ModernBertModel",
            shapes.MODERN,
            bpe_tokenizer,
            pooling="cls",
            tail=(Dense(32, "GELU", bias=False), LayerNorm(32), Dense(1, "Identity")),
            modules=True,
            function="none",
            prepare=(_ends_in_scores,),
        ),
        "the first token, layers that end in a score",
        (
            "cross-encoder/ettin-reranker-17m-v1",
            "cross-encoder/ettin-reranker-32m-v1",
            "cross-encoder/ettin-reranker-68m-v1",
            "cross-encoder/ettin-reranker-400m-v1",
            "cross-encoder/ettin-reranker-1b-v1",
        ),
    ),
    Entry(
        "castorini/monot5-base-msmarco",
        comparison(
            "T5ForConditionalGeneration",
            {**shapes.T5, "decoder_start_token_id": 0},
            {
                "task": "rerank",
                "score_tokens": ("a", "b"),
                "rerank_body": "Query: {query} Document: {document} Relevant:",
            },
            tokenizer=tokenizers.t5,
        ),
        "scores of the decoder's first token",
    ),
)


def _splade(folder: Path) -> None:
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    prefix = "sentence_transformers.sparse_encoder.models"
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", entries)
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})


def _router(folder: Path, activation: str = "relu") -> None:
    """Queries by a table of weights, documents by a masked language model (sentence-transformers' Router)."""
    prefix = "sentence_transformers.sparse_encoder.models"
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
    write_json(folder / "modules.json", [module])
    table, model, pooling = (
        f"{prefix}.SparseStaticEmbedding.SparseStaticEmbedding",
        f"{prefix}.MLMTransformer.MLMTransformer",
        f"{prefix}.SpladePooling.SpladePooling",
    )
    query, document, splade = "query_0_SparseStaticEmbedding", "document_0_MLMTransformer", "document_1_SpladePooling"
    router = {
        "types": {query: table, document: model, splade: pooling},
        "structure": {"query": [query], "document": [document, splade]},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    (folder / document).mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(folder / document / path.name)
    write_json(folder / "router_config.json", router)
    write_json(folder / splade / "config.json", {"pooling_strategy": "max", "activation_function": activation})
    rows = json.loads((folder / document / "config.json").read_text())["vocab_size"]
    (folder / query).mkdir()
    write_tensors(folder / query, {"weight": torch.linspace(0.1, 3.0, rows)})
    write_json(folder / query / "config.json", {"frozen": True})
    shutil.copy(folder / document / "tokenizer.json", folder / query)
    write_json(folder / query / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})


def _pylate(folder: Path, query: str = "[Q] ", document: str = "[D] ") -> None:
    """PyLate's layout: the linear layer is on every token; a marker in front of each side."""
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())]
    write_json(folder / "modules.json", entries)
    save_dense(folder / "1_Dense", 32, Dense(16, "Identity", bias=False))
    lengths = {"query_length": 32, "document_length": 300, "attend_to_expansion_tokens": False}
    markers = {"query_prefix": query, "document_prefix": document, "skiplist_words": [*string.punctuation]}
    write_json(folder / "config_sentence_transformers.json", {**markers, **lengths})


def _residual(folder: Path) -> None:
    _pylate(folder)
    change_json(folder / "1_Dense" / "config.json", use_residual=True)
    matrix = torch.randn(16, 32, generator=torch.Generator().manual_seed(16)) / 6
    write_tensors(folder / "1_Dense", {**read_tensors(folder / "1_Dense"), "residual.weight": matrix})


def _original_colbert(folder: Path) -> None:
    """The original ColBERT's class, its linear layer among the base model's weights."""
    change_config(folder, architectures=["HF_ColBERT"])
    tensors = {f"bert.{name}": tensor for name, tensor in read_tensors(folder).items()}
    linear = save_dense(folder / "linear", 32, Dense(12, "Identity", bias=False))
    write_tensors(folder, {**tensors, **linear})
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "dim": 12, "mask_punctuation": True}
    lengths = {"query_maxlen": 32, "doc_maxlen": 300, "attend_to_mask_tokens": False}
    write_json(folder / "artifact.metadata", {**markers, **lengths})


_HF_COLBERT = Structure(
    "embed_tokens",
    "BertModel",
    shapes.ENCODER,
    tokenizers.unused,
    prepare=(_original_colbert,),
    late=Late(12, "[unused0]", "[unused1]", mask="[MASK]"),
)
_PYLATE = Structure(
    "embed_tokens", "ModernBertModel", shapes.MODERN, tokenizers.pylate, prepare=(_pylate,), late=Late(16)
)

SPARSE_AND_LATE = (
    Entry(
        "naver/splade-v3",
        Structure("embed_sparse", "BertForMaskedLM", shapes.ENCODER, prepare=(_splade,)),
        "SpladePooling",
        ("prithivida/Splade_PP_en_v1", "prithivida/Splade_PP_en_v2"),
    ),
    Entry(
        "naver/splade-cocondenser-ensembledistil",
        Structure("embed_sparse", "BertForMaskedLM", shapes.ENCODER),
        "no sentence-transformers files",
        ("naver/splade-cocondenser-selfdistil", "opensearch-project/opensearch-neural-sparse-encoding-v1"),
    ),
    Entry(
        "opensearch-project/opensearch-neural-sparse-encoding-v2-distill",
        Structure("embed_sparse", "DistilBertForMaskedLM", shapes.DISTILBERT),
        "DistilBERT",
        ("naver/splade-v3-distilbert",),
    ),
    Entry(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill",
        Structure(
            "embed_sparse",
            "DistilBertForMaskedLM",
            shapes.DISTILBERT,
            prepare=(partial(_router, activation="log1p_relu"),),
        ),
        "Router: queries by a table; two logarithms",
        unsure="names of its folders; the logarithms are doc-v3-gte's",
    ),
    Entry(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v2-distill",
        Structure("embed_sparse", "DistilBertForMaskedLM", shapes.DISTILBERT, prepare=(_router,)),
        "Router: queries by a table",
        unsure="names of its folders",
    ),
    Entry(
        "naver/splade-v3-doc",
        Structure("embed_sparse", "BertForMaskedLM", shapes.ENCODER, prepare=(_router,)),
        "Router: queries by a table",
        ("opensearch-project/opensearch-neural-sparse-encoding-multilingual-v1",),
        unsure="names of its folders",
    ),
    Entry(
        "ibm-granite/granite-embedding-30m-sparse",
        Structure("embed_sparse", "RobertaForMaskedLM", shapes.ROBERTA, bpe_tokenizer, prepare=(_splade,)),
        "RoBERTa",
    ),
    Entry(
        "colbert-ir/colbertv2.0",
        _HF_COLBERT,
        "the original ColBERT's class and metadata",
        ("answerdotai/answerai-colbert-small-v1", "mixedbread-ai/mxbai-colbert-large-v1"),
    ),
    Entry(
        "lightonai/GTE-ModernColBERT-v1",
        _PYLATE,
        "PyLate's files",
        ("lightonai/Reason-ModernColBERT", "lightonai/LateOn", "lightonai/LateOn-Code"),
    ),
    Entry(
        "lightonai/colbertv2.0",
        Structure(
            "embed_tokens",
            "BertModel",
            shapes.ENCODER,
            tokenizers.unused,
            prepare=(partial(_pylate, query="[unused0]", document="[unused1]"),),
            late=Late(16, "[unused0]", "[unused1]", mask="[MASK]"),
        ),
        "PyLate's files, BERT, the original ColBERT's markers",
    ),
    Entry(
        "mixedbread-ai/mxbai-edge-colbert-v0-17m",
        replace(_PYLATE, prepare=(_residual,)),
        "a Dense layer with a residual",
        ("mixedbread-ai/mxbai-edge-colbert-v0-32m",),
        unsure="how many Dense layers it has, and which of them have a residual",
    ),
    Entry(
        "jinaai/jina-colbert-v2",
        Structure(
            "embed_tokens",
            files={
                "config.json": {
                    "architectures": ["HF_ColBERT"],
                    "model_type": "xlm-roberta",
                    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
                },
            },
        ),
        "remote code: XLM-RoBERTa with rotations",
    ),
    Entry(
        "LiquidAI/LFM2-ColBERT-350M",
        Structure(
            "embed_tokens",
            "Lfm2Model",
            shapes.decoder(4, 2, **shapes.rope(theta=1000000.0)) | {"layer_types": ["conv", "full_attention"]},
            tokenizers.pylate,
            prepare=(_pylate,),
            late=Late(16),
        ),
        "convolutions between attention layers",
    ),
    Entry(
        "antoinelouis/colbert-xm",
        Structure(
            "embed_tokens",
            files={"config.json": {"model_type": "xmod", "architectures": ["HF_ColBERT_XMOD"]}},
        ),
        "adapters by language",
        unsure="the name in architectures",
    ),
)


def _potion(folder: Path) -> None:
    save_static(folder, normalize=True)
    add_static_modules(folder, ".", "Normalize")


STATIC = (
    Entry(
        "minishlab/potion-base-8M",
        Structure(
            "embed",
            prepare=(_potion,),
            tail=UNIT,
            files={"config.json": {"model_type": "model2vec", "architectures": ["StaticModel"]}},
            static="without unknown",
        ),
        "model2vec: unknown tokens are left out",
        (
            "minishlab/potion-base-2M",
            "minishlab/potion-base-32M",
            "minishlab/potion-retrieval-32M",
            "minishlab/potion-multilingual-128M",
            "minishlab/M2V_base_output",
        ),
    ),
    Entry(
        "sentence-transformers/static-retrieval-mrl-en-v1",
        Structure("embed", prepare=(partial(save_static, writer="sentence-transformers"),), static="with unknown"),
        "StaticEmbedding, no config.json",
        ("sentence-transformers/static-similarity-mrl-multilingual-v1",),
    ),
    Entry(
        "sentence-transformers/average_word_embeddings_glove.6B.300d",
        Structure(
            "embed",
            files={
                "modules.json": [
                    {
                        "idx": 0,
                        "name": "0",
                        "path": "0_WordEmbeddings",
                        "type": "sentence_transformers.models.WordEmbeddings",
                    },
                    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                ]
            },
        ),
        "words are looked up whole",
        ("sentence-transformers/average_word_embeddings_komninos",),
    ),
)
