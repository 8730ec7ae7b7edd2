"""Encoders that embed texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bei.core import Encoding
from tests.bei_build.families import jina, nomic
from tests.hub_matrix import shapes, stored, tokenizers
from tests.hub_matrix.structures import Entry, Structure
from tests.support.checkpoints import (
    Dense,
    Normalize,
    bpe_tokenizer,
    change_config,
    read_tensors,
    unigram_tokenizer,
    wordpiece_tokenizer,
)
from tests.support.recipes import remote_gte

UNIT = (Normalize(),)


def embedder(
    hf_class: str, settings: dict[str, Any], pooling: str = "mean", *, unit: bool = True, **more: Any
) -> Structure:
    """An embedder with sentence-transformers' files."""
    given: dict[str, Any] = {"modules": True, "tail": UNIT if unit else (), **more}
    return Structure("embed", hf_class, settings, pooling=pooling, **given)


def bare(hf_class: str, settings: dict[str, Any], pooling: str = "mean", **more: Any) -> Structure:
    """A checkpoint of which the user must say that it embeds, and how."""
    options = {"task": "embed", "pooling": pooling, **more.pop("options", {})}
    # Vectors get unit length where no file says otherwise.
    return Structure("embed", hf_class, settings, pooling=pooling, tail=UNIT, options=options, **more)


def bert(pooling: str = "mean", **more: Any) -> Structure:
    """BertModel with sentence-transformers' files."""
    return embedder("BertModel", shapes.ENCODER, pooling, **more)


def xlm(pooling: str = "mean", **more: Any) -> Structure:
    """XLMRobertaModel with sentence-transformers' files."""
    return embedder("XLMRobertaModel", shapes.ROBERTA, pooling, **{"tokenizer": unigram_tokenizer, **more})


def roberta(pooling: str = "mean", **more: Any) -> Structure:
    """RobertaModel with sentence-transformers' files."""
    return embedder("RobertaModel", shapes.ROBERTA, pooling, **{"tokenizer": bpe_tokenizer, **more})


def modern(pooling: str = "mean", **more: Any) -> Structure:
    """ModernBertModel with sentence-transformers' files."""
    return embedder("ModernBertModel", shapes.MODERN, pooling, **{"tokenizer": bpe_tokenizer, **more})


def mpnet(pooling: str = "mean", **more: Any) -> Structure:
    """MPNetModel with sentence-transformers' files."""
    return embedder("MPNetModel", shapes.MPNET, pooling, tokenizer=tokenizers.mpnet, **more)


def t5(pooling: str = "mean", **more: Any) -> Structure:
    """T5EncoderModel with sentence-transformers' files."""
    return embedder(
        "T5EncoderModel",
        more.pop("settings", shapes.T5),
        pooling,
        **{"tokenizer": tokenizers.t5, "max_tokens": 512, **more},
    )


def without_prefix(name: str) -> Callable[[Path], Path]:
    """Tensors of a base model under the class with a head that config.json names."""
    return lambda folder: change_config(folder, architectures=[name])


def _nomic_states(folder: Path) -> Callable[[Encoding], torch.Tensor]:
    return nomic.Oracle(folder).states


def nomic_embedder(pooling: str = "mean", **changes: Any) -> Structure:
    """NomicBERT as its own code saves it, which transformers' class reads in part; ``changes`` are of config.json."""
    return Structure(
        "embed",
        tokenizer=unigram_tokenizer,
        prepare=(partial(nomic.save, **changes), partial(stored.tokenizer_class, name="XLMRobertaTokenizer")),
        states=_nomic_states,
        pooling=pooling,
        tail=UNIT,
        options={"pooling": pooling},
        max_tokens=nomic.LONGEST,
        files={"config.json": {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}},
    )


def jina_states(code: str, prefix: str = "") -> Callable[[Path], Callable[[Encoding], torch.Tensor]]:
    """JinaBERT's in torch."""

    def states_of(folder: Path) -> Callable[[Encoding], torch.Tensor]:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}
        return partial(jina.states, tensors, code=code)

    return states_of


def jina_embedder(code: str = jina.PAPERS, tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer) -> Structure:
    """JinaBERT v2, which transformers does not have."""
    return Structure(
        "embed",
        tokenizer=tokenizer,
        prepare=(
            partial(jina.save, code=code, tokenizer=tokenizer),
            *((partial(stored.tokenizer_class, name="RobertaTokenizer"),) if tokenizer is bpe_tokenizer else ()),
        ),
        states=jina_states(code),
        tail=UNIT,
        options={"pooling": "mean"},
        max_tokens=jina.LONGEST,
        files={"config.json": {"model_type": "bert", "architectures": ["JinaBertForMaskedLM"]}},
    )


_TYPES_FROM_CLASS = {"tokenizer_config.json": {"tokenizer_class": "XLMRobertaTokenizer"}}
_REPRESENT = {"query": "Represent this sentence for searching relevant passages: "}
_SEARCH = {"query": "search_query: ", "passage": "search_document: "}
_WITHOUT_EXPERTS: dict[str, Any] = {
    "num_experts": 0,
    "activation_function": "swiglu",
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
}


def gte(theta: float, factor: float, num_types: int) -> dict[str, Any]:
    """GTE's settings with the remote code's NTK scaling: its base is multiplied, its frequencies are divided."""
    head_dim = shapes.ENCODER["hidden_size"] // shapes.ENCODER["num_attention_heads"]
    scaled = shapes.rope("linear", theta * factor, factor=factor ** (2 / head_dim))
    return {**shapes.ENCODER, "type_vocab_size": num_types, **scaled}


BERT = (
    Entry(
        "sentence-transformers/all-MiniLM-L6-v2",
        bert(
            files={"sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False}},
            max_tokens=32,
            prepare=(stored.position_ids,),
        ),
        "max_seq_length below the model's; numbers of positions among the weights",
        (
            "sentence-transformers/all-MiniLM-L12-v2",
            "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
            "sentence-transformers/msmarco-MiniLM-L6-cos-v5",
            "intfloat/e5-small-v2",
            "intfloat/e5-base-v2",
            "intfloat/e5-large-v2",
        ),
    ),
    Entry(
        "sentence-transformers/paraphrase-MiniLM-L6-v2",
        bert(unit=False),
        "mean",
        (
            "sentence-transformers/paraphrase-MiniLM-L3-v2",
            "shibing624/text2vec-base-chinese",
            "moka-ai/m3e-base",
            "NeuML/pubmedbert-base-embeddings",
            "pritamdeka/S-PubMedBert-MS-MARCO",
            "hiiamsid/sentence_similarity_spanish_es",
            "snunlp/KR-SBERT-V40K-klueNLI-augSTS",
            "deutsche-telekom/gbert-large-paraphrase-cosine",
        ),
    ),
    Entry(
        "BAAI/bge-small-en-v1.5",
        bert("cls"),
        "first token, unit length",
        (
            "BAAI/bge-base-en-v1.5",
            "BAAI/bge-large-en-v1.5",
            "BAAI/bge-small-zh-v1.5",
            "BAAI/bge-base-zh-v1.5",
            "BAAI/bge-large-zh-v1.5",
            "BAAI/llm-embedder",
        ),
    ),
    Entry(
        "cointegrated/rubert-tiny2",
        embedder("BertForPreTraining", shapes.ENCODER, "cls"),
        "saved with the heads of its training",
        unsure="that it has these heads: copies of it are saved as BertModel",
    ),
    Entry(
        "mixedbread-ai/mxbai-embed-large-v1",
        bert("cls", unit=False, prompts=_REPRESENT),
        "first token; prompts",
        ("WhereIsAI/UAE-Large-V1",),
    ),
    Entry(
        "Snowflake/snowflake-arctic-embed-l",
        bert("cls", prompts=_REPRESENT),
        "first token, unit length; prompts",
        (
            "Snowflake/snowflake-arctic-embed-xs",
            "Snowflake/snowflake-arctic-embed-s",
            "Snowflake/snowflake-arctic-embed-m",
            "Snowflake/snowflake-arctic-embed-m-v1.5",
        ),
    ),
    Entry(
        "thenlper/gte-base",
        bert(stored=torch.float16),
        "stored in float16",
        ("thenlper/gte-small", "thenlper/gte-large"),
    ),
    Entry("thenlper/gte-large-zh", bert("cls", stored=torch.float16), "first token, stored in float16"),
    Entry(
        "intfloat/multilingual-e5-small",
        bert(tokenizer=unigram_tokenizer, files=_TYPES_FROM_CLASS, types=False),
        "BERT with XLM-RoBERTa's tokenizer, which gives no token types",
        unsure="the name in architectures: vLLM lists it as XLMRobertaModel",
    ),
    Entry(
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
        bert(tokenizer=unigram_tokenizer, unit=False, files=_TYPES_FROM_CLASS, types=False),
        "BERT with a unigram tokenizer",
        unsure="the tokenizer's class: its authors named none at first",
    ),
    Entry(
        "sentence-transformers/LaBSE",
        bert("cls", tail=(Dense(32, "Tanh"), Normalize())),
        "first token, a Dense layer with tanh",
    ),
    Entry(
        "MongoDB/mdbr-leaf-ir",
        bert(tail=(Dense(64, "Identity"), Normalize())),
        "a wider Dense layer",
        ("MongoDB/mdbr-leaf-mt",),
    ),
    Entry("aspire/acge_text_embedding", bert(tail=(Dense(56, "Identity"),)), "a wider Dense layer comes last"),
    Entry(
        "TencentBAC/Conan-embedding-v1",
        bert(tail=(Dense(56, "Identity"), Normalize())),
        "a wider Dense layer",
        ("iampanda/zpoint_large_embedding_zh", "infgrad/stella-large-zh-v3-1792d"),
        unsure="whether the Dense layer is followed by a Normalize; mteb lists 768 dimensions",
    ),
    Entry(
        "facebook/contriever",
        bare("BertModel", shapes.ENCODER, changes={"architectures": ["Contriever"]}, prepare=(stored.pickled,)),
        "no sentence-transformers files; a class of its own code that is BertModel",
        ("facebook/contriever-msmarco", "facebook/mcontriever-msmarco"),
        unsure="the name in architectures",
    ),
    Entry(
        "nthakur/contriever-base-msmarco",
        bert(unit=False),
        "Contriever with sentence-transformers' files",
    ),
    Entry(
        "allenai/specter",
        bare("BertModel", shapes.ENCODER, "cls", prepare=(stored.vocabulary_file, stored.pickled)),
        "vocab.txt and pytorch_model.bin only",
        (
            "ncbi/MedCPT-Query-Encoder",
            "ncbi/MedCPT-Article-Encoder",
            "cambridgeltl/SapBERT-from-PubMedBERT-fulltext",
            "allenai/specter2_base",
        ),
        unsure="which files the others of this structure have",
    ),
    Entry(
        "google-bert/bert-base-uncased",
        bare("BertForMaskedLM", shapes.ENCODER, prepare=(stored.gamma_and_beta,)),
        "a masked language model read as an embedder; TensorFlow's names of norms",
        ("google-bert/bert-base-multilingual-cased", "emilyalsentzer/Bio_ClinicalBERT"),
    ),
    Entry(
        "princeton-nlp/sup-simcse-bert-base-uncased",
        bare("BertModel", shapes.ENCODER, "cls"),
        "the state of the first token (`cls_before_pooler`)",
        unsure="its own code takes the pooler's output, a tanh layer on this state, which bei does not have",
    ),
)

ROBERTA = (
    Entry(
        "sentence-transformers/all-distilroberta-v1",
        roberta(prepare=(without_prefix("RobertaForMaskedLM"),)),
        "the base model's tensors under the class with a head",
        ("sentence-transformers/all-roberta-large-v1",),
    ),
    Entry(
        "jhgan/ko-sroberta-multitask",
        roberta(unit=False),
        "mean",
        ("sentence-transformers/nli-roberta-base-v2", "sentence-transformers/stsb-roberta-base-v2"),
    ),
    Entry(
        "ibm-granite/granite-embedding-30m-english",
        roberta("cls", stored=torch.bfloat16),
        "first token, stored in bfloat16",
        ("ibm-granite/granite-embedding-125m-english",),
    ),
    Entry(
        "ai-forever/ru-en-RoSBERTa",
        roberta("cls", prompts={"search_query": "search_query: ", "classification": "classification: "}),
        "first token; prompts by task",
    ),
    Entry(
        "microsoft/codebert-base",
        bare("RobertaModel", shapes.ROBERTA, "cls", tokenizer=bpe_tokenizer),
        "no sentence-transformers files",
        ("microsoft/unixcoder-base",),
    ),
    Entry(
        "FacebookAI/roberta-base",
        bare("RobertaForMaskedLM", shapes.ROBERTA, tokenizer=bpe_tokenizer),
        "a masked language model read as an embedder",
        ("microsoft/graphcodebert-base", "distilbert/distilroberta-base"),
    ),
    Entry(
        "intfloat/multilingual-e5-large",
        xlm(),
        "mean, unit length",
        (
            "intfloat/multilingual-e5-base",
            "intfloat/multilingual-e5-large-instruct",
            "OrdalieTech/Solon-embeddings-large-0.1",
        ),
    ),
    Entry(
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2",
        xlm(unit=False),
        "mean",
        (
            "sentence-transformers/stsb-xlm-r-multilingual",
            "sentence-transformers/paraphrase-xlm-r-multilingual-v1",
            "T-Systems-onsite/cross-en-de-roberta-sentence-transformer",
        ),
    ),
    Entry(
        "BAAI/bge-m3",
        xlm("cls", linear_files=True, prepare=(stored.pickled,)),
        "dense, words' weights and tokens' vectors; pytorch_model.bin only",
    ),
    Entry(
        "Snowflake/snowflake-arctic-embed-l-v2.0",
        xlm("cls", prompts={"query": "query: "}),
        "first token; prompts",
        ("dragonkue/snowflake-arctic-embed-l-v2.0-ko",),
    ),
    Entry(
        "ibm-granite/granite-embedding-278m-multilingual",
        xlm("cls", stored=torch.bfloat16),
        "first token, stored in bfloat16",
        ("ibm-granite/granite-embedding-107m-multilingual", "maidalun1020/bce-embedding-base_v1"),
    ),
    Entry(
        "FacebookAI/xlm-roberta-base",
        bare("XLMRobertaForMaskedLM", shapes.ROBERTA, tokenizer=unigram_tokenizer),
        "a masked language model read as an embedder",
    ),
    Entry(
        "dangvantuan/sentence-camembert-base",
        embedder("CamembertModel", shapes.ROBERTA, unit=False, tokenizer=unigram_tokenizer),
        "mean",
        ("dangvantuan/sentence-camembert-large", "Lajavaness/sentence-camembert-large"),
    ),
)

OTHER_ENCODERS = (
    Entry(
        "sentence-transformers/distiluse-base-multilingual-cased-v2",
        embedder("DistilBertModel", shapes.DISTILBERT, tail=(Dense(24, "Tanh"),)),
        "a narrower Dense layer with tanh",
        ("sentence-transformers/distiluse-base-multilingual-cased-v1",),
    ),
    Entry(
        "sentence-transformers/msmarco-distilbert-base-tas-b",
        embedder("DistilBertModel", shapes.DISTILBERT, "cls", unit=False),
        "first token",
        unsure="sentence-transformers' list of models says mean",
    ),
    Entry(
        "sentence-transformers/multi-qa-distilbert-cos-v1",
        embedder("DistilBertModel", shapes.DISTILBERT),
        "mean, unit length",
        ("sentence-transformers/msmarco-distilbert-cos-v5",),
    ),
    Entry(
        "sentence-transformers/msmarco-distilbert-base-v4",
        embedder("DistilBertModel", shapes.DISTILBERT, unit=False),
        "mean",
    ),
    Entry(
        "sentence-transformers/all-mpnet-base-v2",
        mpnet(prepare=(without_prefix("MPNetForMaskedLM"),)),
        "the base model's tensors under the class with a head",
        ("sentence-transformers/all-mpnet-base-v1",),
    ),
    Entry(
        "sentence-transformers/multi-qa-mpnet-base-dot-v1",
        mpnet("cls", unit=False),
        "first token",
    ),
    Entry(
        "sentence-transformers/paraphrase-mpnet-base-v2",
        mpnet(unit=False),
        "mean",
    ),
    Entry(
        "sentence-transformers/multi-qa-mpnet-base-cos-v1",
        mpnet(),
        "mean, unit length",
    ),
    Entry(
        "sentence-transformers/paraphrase-albert-small-v2",
        embedder("AlbertModel", shapes.ALBERT, unit=False, tokenizer=unigram_tokenizer),
        "all layers share their weights; a factorized table",
    ),
    Entry(
        "nomic-ai/nomic-embed-text-v1.5",
        nomic_embedder(**_WITHOUT_EXPERTS),
        "GPT-2's keys and the tensors of the remote code",
        ("nomic-ai/nomic-embed-text-v1", "nomic-ai/CodeRankEmbed", "nomic-ai/nomic-embed-text-v1-unsupervised"),
        unsure="its tokenizer is BERT's, and XLM-RoBERTa's here",
    ),
    Entry(
        "Snowflake/snowflake-arctic-embed-m-long",
        nomic_embedder("cls", **_WITHOUT_EXPERTS),
        "GPT-2's keys and the tensors of the remote code; first token",
        unsure="its tokenizer is BERT's, and XLM-RoBERTa's here",
    ),
    Entry(
        "nomic-ai/nomic-embed-text-v2-moe",
        nomic_embedder(),
        "experts in every second layer",
    ),
    Entry(
        "Alibaba-NLP/gte-large-en-v1.5",
        embedder(
            "GteModel", gte(160000.0, 2.0, 2), "cls", unit=False, prepare=(stored.new_names, remote_gte(160000.0, 2.0))
        ),
        "fixed NTK scaling of the remote code",
        ("Alibaba-NLP/gte-base-en-v1.5",),
    ),
    Entry(
        "Alibaba-NLP/gte-multilingual-base",
        embedder(
            "GteModel",
            gte(20000.0, 8.0, 1),
            "cls",
            tokenizer=unigram_tokenizer,
            prepare=(
                stored.new_names,
                remote_gte(20000.0, 8.0, "new.", classifier__weight=torch.ones(1, 32), classifier__bias=torch.ones(1)),
                partial(change_config, architectures=["NewModel", "NewForTokenClassification"]),
            ),
            stored=torch.float16,
        ),
        "a prefix, two names of classes, a classifier that is left aside; stored in float16",
    ),
    Entry(
        "NovaSearch/stella_en_400M_v5",
        embedder(
            "GteModel",
            gte(160000.0, 2.0, 2),
            tail=(Dense(40, "Identity"),),
            prepare=(stored.new_names, remote_gte(160000.0, 2.0, "new.")),
            prompts={"s2p_query": "Instruct: Retrieve passages that answer the query.\nQuery: "},
        ),
        "a Dense layer of the chosen width; prompts",
    ),
    Entry(
        "Snowflake/snowflake-arctic-embed-m-v2.0",
        embedder(
            "GteModel",
            {**shapes.ENCODER, "type_vocab_size": 1, **shapes.rope(theta=160000.0)},
            "cls",
            tokenizer=unigram_tokenizer,
            prepare=(stored.new_names,),
            prompts={"query": "query: "},
            changes={
                "auto_map": {
                    "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
                    "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
                },
                "position_embedding_type": "rope",
                "layer_norm_type": "layer_norm",
                "pack_qkv": True,
                "logn_attention_scale": False,
            },
        ),
        "the remote code's fork of GTE: its type and class, the first code's tensors",
        unsure="names of its files, and the base of its rotations",
    ),
    Entry(
        "jinaai/jina-embeddings-v2-base-en",
        jina_embedder(),
        "ALiBi, a gated MLP",
        (
            "jinaai/jina-embeddings-v2-small-en",
            "jinaai/jina-embeddings-v2-base-de",
            "jinaai/jina-embeddings-v2-base-zh",
            "jinaai/jina-embeddings-v2-base-es",
        ),
    ),
    Entry(
        "jinaai/jina-embeddings-v2-base-code",
        jina_embedder(jina.CODE, bpe_tokenizer),
        "ALiBi, norms of queries and keys, another block",
    ),
    Entry(
        "nomic-ai/modernbert-embed-base",
        modern(prompts=_SEARCH),
        "windows; mean, unit length",
        ("lightonai/modernbert-embed-large",),
    ),
    Entry("Alibaba-NLP/gte-modernbert-base", modern("cls", unit=False), "first token"),
    Entry(
        "ibm-granite/granite-embedding-english-r2",
        modern("cls", stored=torch.bfloat16),
        "first token, unit length",
        ("ibm-granite/granite-embedding-small-english-r2", "lightonai/DenseOn"),
    ),
    Entry(
        "cl-nagoya/ruri-v3-310m",
        modern(unit=False, tokenizer=unigram_tokenizer, prompts={"query": "検索クエリ: ", "document": "検索文書: "}),
        "ModernBERT with a SentencePiece tokenizer",
        ("cl-nagoya/ruri-v3-30m", "cl-nagoya/ruri-v3-130m"),
    ),
    Entry(
        "EuroBERT/EuroBERT-210m",
        bare("EuroBertForMaskedLM", shapes.decoder(4, 4, **shapes.rope(theta=250000.0)), tokenizer=bpe_tokenizer),
        "a masked language model read as an embedder",
        ("EuroBERT/EuroBERT-610m", "EuroBERT/EuroBERT-2.1B"),
    ),
)

ENCODER_DECODERS = (
    Entry(
        "sentence-transformers/gtr-t5-base",
        t5(tail=(Dense(32, "Identity", bias=False), Normalize())),
        "an encoder with relative positions, a Dense layer without bias",
        (
            "sentence-transformers/sentence-t5-base",
            "sentence-transformers/gtr-t5-large",
            "sentence-transformers/sentence-t5-large",
        ),
    ),
    Entry(
        "sentence-transformers/gtr-t5-xxl",
        t5(tail=(Dense(24, "Identity", bias=False), Normalize()), stored=torch.float16),
        "stored in float16, a narrower Dense layer",
        ("sentence-transformers/sentence-t5-xxl", "sentence-transformers/gtr-t5-xl"),
    ),
    Entry(
        "hkunlp/instructor-large",
        t5(tail=(Dense(24, "Identity", bias=False), Normalize())),
        "as sentence-transformers reads it: instructions are pooled with the text",
        ("hkunlp/instructor-base", "hkunlp/instructor-xl"),
        unsure="its own library leaves instructions out of the mean",
    ),
    Entry(
        "ai-forever/FRIDA",
        t5(
            "cls",
            settings=shapes.T5_V1_1,
            tokenizer=bpe_tokenizer,
            tokenizer_class="GPT2Tokenizer",
            prompts={"search_query": "search_query: ", "paraphrase": "paraphrase: "},
        ),
        "first token, a gated MLP, a byte-level tokenizer; prompts by task",
        unsure="whether its MLP is gated, and what its tokenizer puts around a text",
    ),
    Entry(
        "google-t5/t5-small",
        bare(
            "T5ForConditionalGeneration",
            {**shapes.T5, "decoder_start_token_id": 0},
            tokenizer=tokenizers.t5,
            max_tokens=512,
        ),
        "the decoder is left aside",
        ("google-t5/t5-base",),
    ),
    Entry(
        "google/flan-t5-base",
        bare(
            "T5ForConditionalGeneration",
            {**shapes.T5_V1_1, "decoder_start_token_id": 0},
            tokenizer=tokenizers.t5,
            max_tokens=512,
        ),
        "a gated MLP, an untied head; the decoder is left aside",
        ("google/t5-v1_1-base",),
    ),
    Entry(
        "google/mt5-small",
        bare(
            "MT5ForConditionalGeneration",
            {**shapes.T5_V1_1, "decoder_start_token_id": 0},
            tokenizer=tokenizers.t5,
            max_tokens=512,
        ),
        "the decoder is left aside",
    ),
    Entry(
        "facebook/bart-base",
        bare("BartModel", shapes.BART, tokenizer=bpe_tokenizer),
        "the decoder's states of the same text",
    ),
    Entry(
        "google/umt5-small",
        bare("UMT5EncoderModel", {**shapes.T5_V1_1}, tokenizer=tokenizers.t5, max_tokens=512),
        "relative positions in every layer",
    ),
)
EMBEDDERS = (*BERT, *ROBERTA, *OTHER_ENCODERS, *ENCODER_DECODERS)
