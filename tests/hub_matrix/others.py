"""Encoders of other kinds, and what is no checkpoint of a text model: exports, adapters, quantized weights, images."""

from __future__ import annotations

from typing import Any

import torch

from tests.hub_matrix import shapes, stored, tokenizers
from tests.hub_matrix.embedders import UNIT, bare, bert
from tests.hub_matrix.structures import Entry, Structure
from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer


def encoder(hf_class: str, settings: dict[str, Any] | None = None, **more: Any) -> Structure:
    """An encoder without sentence-transformers' files, read by its mean."""
    return bare(hf_class, settings or shapes.ENCODER, **more)


def named(model_type: str, architecture: str, **more: Any) -> Structure:
    """A repository of which only config.json is told."""
    return Structure(
        "embed", files={"config.json": {"model_type": model_type, "architectures": [architecture], **more}}
    )


_XL = {**shapes.ROBERTA}
_LUKE = {**shapes.ROBERTA, "entity_vocab_size": 8, "entity_emb_size": 16}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
_MOBILE = {
    **shapes.ENCODER,
    "hidden_size": 64,
    "embedding_size": 32,
    "intra_bottleneck_size": 32,
    "true_hidden_size": 32,
}

ENCODERS = (
    Entry(
        "facebook/esm2_t6_8M_UR50D",
        encoder(
            "EsmForMaskedLM",
            {
                **shapes.ENCODER,
                "position_embedding_type": "rotary",
                "token_dropout": False,
                "pad_token_id": 0,
                "mask_token_id": 4,
                "emb_layer_norm_before": False,
            },
            prepare=(stored.python_tokenizer("EsmTokenizer", "vocab.txt"),),
        ),
        "proteins: rotations, norms in front; a tokenizer in Python only",
        ("facebook/esm2_t33_650M_UR50D",),
        unsure="token_dropout is on in the repository, and off here",
    ),
    Entry(
        "nghuyong/ernie-3.0-base-zh",
        encoder("ErnieModel", {**shapes.ENCODER, "use_task_id": True, "task_type_vocab_size": 3}),
        "BERT with task ids",
        ("shibing624/text2vec-base-chinese-paraphrase", "nghuyong/ernie-3.0-nano-zh"),
        unsure="whether all of these have task ids",
    ),
    Entry("microsoft/deberta-base", encoder("DebertaModel", shapes.DEBERTA_V1, tokenizer=bpe_tokenizer), "DeBERTa v1"),
    Entry(
        "microsoft/mdeberta-v3-base",
        encoder("DebertaV2Model", shapes.DEBERTA, tokenizer=unigram_tokenizer, changes={"architectures": None}),
        "config.json names no class",
        ("microsoft/deberta-v3-base", "microsoft/deberta-v3-small", "allenai/scibert_scivocab_uncased"),
    ),
    Entry(
        "google/electra-base-discriminator",
        encoder("ElectraForPreTraining", shapes.ELECTRA),
        "the discriminator's head is left aside",
        ("google/electra-small-discriminator",),
    ),
    Entry(
        "facebook/dpr-question_encoder-single-nq-base",
        encoder("DPRQuestionEncoder"),
        "BERT under another name",
        ("facebook/dpr-ctx_encoder-single-nq-base",),
    ),
    Entry("facebook/xlm-roberta-xl", encoder("XLMRobertaXLModel", _XL, tokenizer=unigram_tokenizer), "norms in front"),
    Entry(
        "princeton-nlp/efficient_mlm_m0.40",
        encoder("RobertaPreLayerNormModel", _XL, tokenizer=bpe_tokenizer),
        "norms in front",
    ),
    Entry(
        "facebook/data2vec-text-base",
        encoder("Data2VecTextModel", _XL, tokenizer=bpe_tokenizer),
        "RoBERTa under another name",
    ),
    Entry("kssteven/ibert-roberta-base", encoder("IBertModel", _XL, tokenizer=bpe_tokenizer), "RoBERTa for integers"),
    Entry(
        "facebook/xmod-base",
        encoder(
            "XmodModel",
            {**_XL, "languages": ["en_XX", "fr_XX"], "default_language": "en_XX"},
            tokenizer=unigram_tokenizer,
        ),
        "adapters by language",
    ),
    Entry(
        "google/rembert",
        encoder("RemBertModel", {**shapes.ENCODER, "input_embedding_size": 16}, tokenizer=unigram_tokenizer),
        "a factorized table",
    ),
    Entry("nvidia/megatron-bert-cased-345m", encoder("MegatronBertModel"), "norms in front"),
    Entry("google/mobilebert-uncased", encoder("MobileBertModel", _MOBILE), "bottlenecks"),
    Entry(
        "squeezebert/squeezebert-uncased",
        encoder(
            "SqueezeBertModel",
            {
                **shapes.ENCODER,
                "embedding_size": 32,
                **dict.fromkeys(("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 4),
            },
        ),
        "convolutions in groups",
    ),
    Entry(
        "YituTech/conv-bert-base",
        encoder("ConvBertModel", {**shapes.ENCODER, "embedding_size": 32, "conv_kernel_size": 3}),
        "convolutions beside attention",
    ),
    Entry(
        "junnyu/roformer_chinese_base",
        encoder("RoFormerModel", {**shapes.ENCODER, "embedding_size": 32, "rotary_value": False}),
        "interleaved rotations",
    ),
    Entry(
        "google/fnet-base",
        encoder("FNetModel", {k: v for k, v in shapes.ENCODER.items() if k != "num_attention_heads"}),
        "Fourier transforms",
    ),
    Entry(
        "uw-madison/nystromformer-512",
        named("nystromformer", "NystromformerModel"),
        "approximated attention",
    ),
    Entry(
        "allenai/longformer-base-4096",
        encoder(
            "LongformerModel",
            {**shapes.ROBERTA, "attention_window": 16, "max_position_embeddings": 66},
            tokenizer=bpe_tokenizer,
        ),
        "windows and global tokens",
        ("allenai/longformer-large-4096",),
    ),
    Entry(
        "google/bigbird-roberta-base",
        encoder("BigBirdModel", {**shapes.ENCODER, "attention_type": "original_full"}, tokenizer=unigram_tokenizer),
        "blocks of attention",
    ),
    Entry("xlnet/xlnet-base-cased", encoder("XLNetModel", _XLNET, tokenizer=unigram_tokenizer), "two streams"),
    Entry("studio-ousia/luke-base", encoder("LukeModel", _LUKE, tokenizer=bpe_tokenizer), "words and entities"),
    Entry(
        "google/canine-s",
        named("canine", "CanineModel"),
        "characters",
    ),
    Entry(
        "flaubert/flaubert_base_cased",
        encoder("FlaubertModel", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 48}),
        "XLM's layers",
    ),
    Entry(
        "funnel-transformer/small-base",
        encoder("FunnelBaseModel", {"d_model": 32, "d_head": 8, "n_head": 4, "d_inner": 64, "block_sizes": [1, 1]}),
        "layers that shorten texts",
    ),
    Entry(
        "facebook/mbart-large-50",
        bare(
            "MBartModel",
            {**shapes.BART, "decoder_start_token_id": 2},
            tokenizer=tokenizers.mbart,
            options={"pooling": "mean"},
        ),
        "norms in front; the decoder's states",
    ),
    Entry(
        "Helsinki-NLP/opus-mt-en-de",
        named("marian", "MarianMTModel"),
        "a translator",
    ),
    Entry(
        "google/pegasus-xsum",
        named("pegasus", "PegasusForConditionalGeneration"),
        "a summarizer",
    ),
    Entry(
        "google/switch-base-8",
        encoder(
            "SwitchTransformersEncoderModel",
            {**shapes.T5, "num_experts": 2, "expert_capacity": 64},
            tokenizer=tokenizers.t5,
        ),
        "T5 with experts",
    ),
    Entry(
        "microsoft/layoutlm-base-uncased",
        encoder("LayoutLMModel", {**shapes.ENCODER, "max_2d_position_embeddings": 32}),
        "BERT with places on a page",
    ),
    Entry(
        "microsoft/biogpt",
        encoder("BioGptModel", shapes.ENCODER, tokenizer=tokenizers.plain),
        "a decoder with learned positions",
    ),
    Entry(
        "google/t5gemma-b-b-ul2",
        Structure(
            "embed",
            files={"config.json": {"model_type": "t5gemma", "architectures": ["T5GemmaForConditionalGeneration"]}},
        ),
        "Gemma 2 as an encoder and a decoder",
    ),
)


def _transformer_of(kind: str) -> Structure:
    """modules.json with one module of sentence-transformers for more than texts."""
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": f"sentence_transformers.models.{kind}"}
    return Structure("embed", files={"modules.json": [module]})


def _quantized(method: str, **more: Any) -> Structure:
    changes = {"quantization_config": {"quant_method": method, **more}}
    return Structure("embed", "Qwen3Model", shapes.QWEN3_06, tokenizers.ends_in_text_end, changes=changes)


_TOWER = {k: v for k, v in shapes.ENCODER.items() if k != "max_position_embeddings"}
_CLIP = {
    "text_config": {**shapes.ENCODER, "vocab_size": tokenizers.clip().get_vocab_size(), "eos_token_id": 2},
    "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4},
    "projection_dim": 24,
}

FORMS = (
    Entry(
        "pritamdeka/BioBERT-mnli-snli-scinli-scitail-mednli-stsb",
        bert(unit=False, prepare=(stored.pickled,)),
        "pytorch_model.bin only",
    ),
    Entry(
        "Xenova/all-MiniLM-L6-v2",
        bert(prepare=(stored.instead_of_weights("onnx/model.onnx", "onnx/model_quantized.onnx"),)),
        "ONNX only, with config.json",
        ("onnx-community/embeddinggemma-300m-ONNX",),
    ),
    Entry(
        "Qdrant/all-MiniLM-L6-v2-onnx",
        bare("BertModel", shapes.ENCODER, prepare=(stored.instead_of_weights("model.onnx"),)),
        "ONNX only, with config.json, without sentence-transformers' files",
    ),
    Entry(
        "nomic-ai/nomic-embed-text-v1.5-GGUF",
        Structure("embed", prepare=(stored.only("nomic-embed-text-v1.5.Q8_0.gguf"),)),
        "GGUF only",
        ("Qwen/Qwen3-Embedding-0.6B-GGUF", "gpustack/bge-m3-GGUF", "gpustack/bge-reranker-v2-m3-GGUF"),
    ),
    Entry(
        "OpenVINO/bge-base-en-v1.5-fp16-ov",
        bert("cls", prepare=(stored.instead_of_weights("openvino_model.xml", "openvino_model.bin"),)),
        "OpenVINO only, with config.json",
        unsure="that it has config.json",
    ),
    Entry(
        "mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ",
        Structure("embed", "Qwen3Model", shapes.QWEN3_06, tokenizers.ends_in_text_end, prepare=(stored.mlx,)),
        "MLX's packed weights",
        ("mlx-community/embeddinggemma-300m-4bit", "mlx-community/bge-small-en-v1.5-4bit"),
        unsure="that config.json says `quantization` alone",
    ),
    Entry(
        "boboliu/Qwen3-Embedding-8B-W4A16-G128",
        _quantized("compressed-tensors", format="pack-quantized"),
        "compressed-tensors",
    ),
    Entry("TheBloke/Mistral-7B-v0.1-GPTQ", _quantized("gptq", bits=4), "GPTQ"),
    Entry("Qwen/Qwen2.5-7B-Instruct-AWQ", _quantized("awq", bits=4), "AWQ"),
    Entry("unsloth/Llama-3.2-1B-bnb-4bit", _quantized("bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    Entry(
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        bare(
            "LlamaForCausalLM",
            shapes.LLAMA3,
            "last",
            tokenizer=tokenizers.llama3,
            stored=torch.float8_e4m3fn,
            prepare=(stored.modelopt_fp8,),
        ),
        "ModelOpt's FP8",
    ),
    Entry("Qwen/Qwen3-8B-FP8", _quantized("fp8", weight_block_size=[128, 128]), "blocks of FP8"),
    Entry(
        "McGill-NLP/LLM2Vec-Meta-Llama-3-8B-Instruct-mntp-supervised",
        Structure("embed", prepare=(stored.adapter,)),
        "an adapter only",
        ("castorini/repllama-v1-7b-lora-passage", "samaya-ai/promptriever-llama2-7b-v1"),
    ),
    Entry(
        "urchade/gliner_medium-v2.1",
        Structure(
            "classify_tokens",
            files={"gliner_config.json": {"model_name": "microsoft/deberta-v3-base"}},
            prepare=(stored.only("pytorch_model.bin"),),
        ),
        "GLiNER: labels come with a request",
        ("urchade/gliner_multi-v2.1", "urchade/gliner_multi_pii-v1", "knowledgator/gliner-bi-large-v1.0"),
    ),
    Entry(
        "numind/NuNER_Zero",
        Structure("classify_tokens", files={"gliner_config.json": {}}),
        "GLiNER: labels come with a request",
    ),
    Entry(
        "tomaarsen/span-marker-bert-base-fewnerd-fine-super",
        Structure(
            "classify_tokens",
            files={"config.json": {"model_type": "span-marker", "architectures": ["SpanMarkerModel"]}},
        ),
        "SpanMarker",
    ),
    Entry(
        "flair/ner-english-large",
        Structure("classify_tokens", prepare=(stored.only("pytorch_model.bin"),)),
        "Flair's own format",
        ("flair/ner-english",),
    ),
    Entry(
        "spacy/en_core_web_sm",
        Structure("classify_tokens", prepare=(stored.only("en_core_web_sm-any-py3-none-any.whl", "meta.json"),)),
        "spaCy's own format",
    ),
    Entry(
        "openai/privacy-filter",
        Structure(
            "classify_tokens",
            files={
                "config.json": {
                    "model_type": "openai_privacy_filter",
                    "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
                }
            },
        ),
        "experts, sinks",
    ),
    Entry(
        "nvidia/prompt-task-and-complexity-classifier",
        Structure(
            "classify",
            files={"config.json": {"target_sizes": {"task_type": 12}, "base_model": "microsoft/DeBERTa-v3-base"}},
        ),
        "PyTorchModelHubMixin: config.json names no model_type",
        ("nvidia/quality-classifier-deberta", "nvidia/domain-classifier"),
    ),
    Entry(
        "vinai/bertweet-base",
        bare(
            "RobertaModel",
            shapes.ROBERTA,
            tokenizer=bpe_tokenizer,
            prepare=(stored.python_tokenizer("BertweetTokenizer", "vocab.txt", "bpe.codes"),),
        ),
        "a tokenizer in Python only",
        ("finiteautomata/bertweet-base-sentiment-analysis",),
    ),
    Entry(
        "vinai/phobert-base-v2",
        bare(
            "RobertaModel",
            shapes.ROBERTA,
            tokenizer=bpe_tokenizer,
            prepare=(stored.python_tokenizer("PhobertTokenizer", "vocab.txt", "bpe.codes"),),
        ),
        "a tokenizer in Python only",
        ("keepitreal/vietnamese-sbert",),
    ),
    Entry(
        "tohoku-nlp/bert-base-japanese-v3",
        bare("BertModel", shapes.ENCODER, prepare=(stored.python_tokenizer("BertJapaneseTokenizer", "vocab.txt"),)),
        "a tokenizer in Python only",
        ("sonoisa/sentence-bert-base-ja-mean-tokens-v2",),
    ),
    Entry(
        "sentence-transformers/clip-ViT-B-32",
        _transformer_of("CLIPModel"),
        "images and texts",
        ("sentence-transformers/clip-ViT-L-14",),
    ),
    Entry(
        "openai/clip-vit-base-patch32",
        Structure("embed", "CLIPModel", _CLIP, tokenizers.clip, tail=UNIT),
        "images and texts",
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K",),
    ),
    Entry("google/siglip-base-patch16-224", named("siglip", "SiglipModel"), "images and texts"),
    Entry(
        "nomic-ai/nomic-embed-vision-v1.5",
        named(
            "nomic_bert",
            "NomicVisionModel",
            auto_map={"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicVisionModel"},
        ),
        "images",
    ),
    Entry(
        "jinaai/jina-clip-v2",
        named(
            "jina_clip",
            "JinaCLIPModel",
            auto_map={"AutoModel": "jinaai/jina-clip-implementation--modeling_clip.JinaCLIPModel"},
        ),
        "images and texts",
    ),
    Entry(
        "jinaai/jina-embeddings-v4",
        named(
            "jina_embeddings_v4",
            "JinaEmbeddingsV4Model",
            auto_map={"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"},
        ),
        "images and texts, adapters by task",
    ),
    Entry(
        "jinaai/jina-reranker-m0",
        named("qwen2_vl", "JinaVLForRanking", auto_map={"AutoModel": "modeling.JinaVLForRanking"}),
        "images and texts",
    ),
    Entry(
        "vidore/colpali-v1.3-hf",
        named("colpali", "ColPaliForRetrieval"),
        "pages as images",
        ("vidore/colqwen2-v1.0-hf",),
    ),
    Entry(
        "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct",
        named("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        "images and texts",
        ("MrLight/dse-qwen2-2b-mrl-v1",),
    ),
    Entry(
        "Qwen/Qwen3-VL-Embedding-2B",
        named("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        "images and texts",
        ("Qwen/Qwen3-VL-Reranker-2B",),
    ),
    Entry(
        "nvidia/omni-embed-nemotron-3b",
        named("nvomniembed", "NVOmniEmbedModel", auto_map={"AutoModel": "modeling_nvomniembed.NVOmniEmbedModel"}),
        "images, sounds and texts",
        unsure="the name of its file",
    ),
    Entry(
        "mistralai/Ministral-3-3B-Instruct-2512",
        named("mistral3", "Mistral3ForConditionalGeneration"),
        "images and texts",
    ),
    Entry("google/gemma-3-4b-it", named("gemma3", "Gemma3ForConditionalGeneration"), "images and texts"),
    Entry("openai/whisper-small", named("whisper", "WhisperForConditionalGeneration"), "sounds"),
)
