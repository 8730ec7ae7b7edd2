"""Language models that embed texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bei_build.families import nv_embed
from tests.hub_matrix import shapes, stored, tokenizers
from tests.hub_matrix.embedders import UNIT, bare, embedder, without_prefix
from tests.hub_matrix.structures import Entry, Structure
from tests.support.checkpoints import MAX_TOKENS, Dense, Normalize, bpe_tokenizer, unigram_tokenizer, write_json


def last(hf_class: str, settings: dict[str, Any], **more: Any) -> Structure:
    """An embedder by the last token's state, with sentence-transformers' files."""
    return embedder(hf_class, settings, "last", **{"tokenizer": tokenizers.plain, **more})


def language_model(hf_class: str, settings: dict[str, Any], **more: Any) -> Structure:
    """A language model that nobody trained to embed, read by its last token."""
    return bare(hf_class, settings, "last", **{"tokenizer": tokenizers.plain, **more})


def _asks_for_end(eos: str, bos: str | None = None) -> Callable[[Path], Path]:
    """A tokenizer_config.json that asks for what tokenizer.json does not add."""
    settings = {"add_bos_token": bos is not None, "add_eos_token": True, "bos_token": bos, "eos_token": eos}
    return lambda folder: write_json(folder / "tokenizer_config.json", settings)


_QWEN3_PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    "document": "",
}
_NEMOTRON = {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"}
_GTE_QWEN2 = {
    "is_causal": False,
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    },
}
_GRITLM = {
    "auto_map": {
        "AutoModel": "modeling_gritlm7b.MistralModel",
        "AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM",
    }
}


def remote(model_type: str, architecture: str, place: str, **more: Any) -> Structure:
    """A repository of which only config.json is told: its code is its own."""
    config = {"model_type": model_type, "architectures": [architecture], "auto_map": {"AutoModel": place}, **more}
    return Structure("embed", files={"config.json": config})


QWEN_AND_LLAMA = (
    Entry(
        "Qwen/Qwen3-Embedding-0.6B",
        last(
            "Qwen3Model",
            shapes.QWEN3_06,
            tokenizer=tokenizers.ends_in_text_end,
            prompts=_QWEN3_PROMPTS,
            prepare=(without_prefix("Qwen3ForCausalLM"),),
        ),
        "the base model's tensors under the class with a head; prompts",
        ("microsoft/harrier-oss-v1-0.6b", "codefuse-ai/F2LLM-0.6B"),
    ),
    Entry(
        "Qwen/Qwen3-Embedding-4B",
        last("Qwen3Model", shapes.QWEN3_4, tokenizer=tokenizers.ends_in_text_end, prompts=_QWEN3_PROMPTS),
        "four heads to one key",
        ("codefuse-ai/F2LLM-4B",),
    ),
    Entry(
        "Qwen/Qwen3-Embedding-8B",
        last("Qwen3Model", shapes.QWEN3_8, tokenizer=tokenizers.ends_in_text_end, prompts=_QWEN3_PROMPTS),
        "an untied table",
        ("Octen/Octen-Embedding-8B",),
    ),
    Entry(
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        last(
            "Qwen2ForCausalLM",
            shapes.QWEN2_6,
            changes=_GTE_QWEN2,
            unmasked=True,
            prepare=(_asks_for_end("<|endoftext|>"),),
            last_token="<|endoftext|>",
        ),
        "is_causal false; tokenizer_config.json asks for an end",
        ("infly/inf-retriever-v1-1.5b", "Qodo/Qodo-Embed-1-1.5B"),
    ),
    Entry(
        "Alibaba-NLP/gte-Qwen2-7B-instruct",
        last(
            "Qwen2ForCausalLM",
            shapes.QWEN2_7,
            changes=_GTE_QWEN2,
            unmasked=True,
            prepare=(_asks_for_end("<|endoftext|>"),),
            last_token="<|endoftext|>",
        ),
        "is_causal false; seven heads to one key",
        ("infly/inf-retriever-v1", "Alibaba-NLP/gte-Qwen1.5-7B-instruct", "nomic-ai/nomic-embed-code"),
        unsure="whether nomic-embed-code has is_causal",
    ),
    Entry(
        "NovaSearch/stella_en_1.5B_v5",
        embedder(
            "Qwen2ForCausalLM",
            shapes.QWEN2_6,
            tokenizer=tokenizers.ends_in_text_end,
            changes={"auto_map": _GTE_QWEN2["auto_map"]},
            unmasked=True,
            tail=(Dense(40, "Identity"),),
            options={"attention": "bidirectional"},
        ),
        "remote code without is_causal: the user says what it does; a mean, a Dense layer",
    ),
    Entry(
        "BAAI/bge-code-v1",
        last("Qwen2Model", shapes.QWEN2_6, tokenizer=tokenizers.ends_in_text_end),
        "causal",
        ("jinaai/jina-code-embeddings-0.5b", "jinaai/jina-code-embeddings-1.5b"),
        unsure="that the files name an end behind texts",
    ),
    Entry(
        "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1",
        embedder("Qwen2Model", shapes.QWEN2_7, tokenizer=tokenizers.plain),
        "a mean of causal states",
        ("HIT-TMG/KaLM-embedding-multilingual-mini-v1",),
        unsure="later versions see both ways by code of their own",
    ),
    Entry(
        "nvidia/llama-nemotron-embed-1b-v2",
        embedder(
            "LlamaModel",
            {**shapes.LLAMA3, "tie_word_embeddings": True},
            tokenizer=tokenizers.llama3,
            changes=_NEMOTRON,
            unmasked=True,
            modules=False,
        ),
        "remote code: all tokens see each other, a mean",
        ("nvidia/llama-3.2-nv-embedqa-1b-v2", "nvidia/llama-embed-nemotron-8b"),
    ),
    Entry(
        "sbintuitions/sarashina-embedding-v1-1b",
        last("LlamaModel", shapes.decoder(4, 4, **shapes.rope()), tokenizer=tokenizers.mistral),
        "causal",
    ),
    Entry(
        "intfloat/e5-mistral-7b-instruct",
        last(
            "MistralModel",
            shapes.MISTRAL,
            tokenizer=tokenizers.mistral,
            prepare=(_asks_for_end("</s>", "<s>"),),
            last_token="</s>",
        ),
        "tokenizer_config.json asks for an end",
    ),
    Entry(
        "Salesforce/SFR-Embedding-2_R",
        last("MistralModel", shapes.MISTRAL, tokenizer=bpe_tokenizer),
        "beginning and end around texts",
        ("Salesforce/SFR-Embedding-Mistral", "Linq-AI-Research/Linq-Embed-Mistral", "BAAI/bge-en-icl"),
    ),
    Entry(
        "GritLM/GritLM-7B",
        bare(
            "MistralForCausalLM",
            shapes.MISTRAL,
            tokenizer=tokenizers.mistral,
            changes=_GRITLM,
            unmasked=True,
            options={"attention": "bidirectional"},
        ),
        "remote code that sees both ways: the user says so",
    ),
    Entry(
        "BAAI/bge-multilingual-gemma2",
        last("Gemma2Model", shapes.GEMMA2, tokenizer=tokenizers.gemma),
        "soft caps, windows",
    ),
    Entry(
        "google/embeddinggemma-300m",
        embedder(
            "Gemma3TextModel",
            shapes.EMBEDDINGGEMMA,
            tokenizer=tokenizers.gemma,
            tail=(Dense(96, "Identity", bias=False), Dense(48, "Identity", bias=False), Normalize()),
            prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
        ),
        "all tokens see each other; windows, two Dense layers",
    ),
    Entry(
        "microsoft/harrier-oss-v1-270m",
        last("Gemma3TextModel", shapes.GEMMA3, tokenizer=tokenizers.gemma),
        "causal; windows",
    ),
    Entry(
        "tencent/KaLM-Embedding-Gemma3-12B-2511",
        last("Gemma3TextModel", shapes.GEMMA3, tokenizer=tokenizers.gemma),
        "causal; windows",
        unsure="that it is causal, and read by its last token: pages on its series say neither",
    ),
)

# Rotations reach as far as the config says.
_JINA_V3 = {**shapes.ROBERTA, "max_position_embeddings": MAX_TOKENS, **shapes.rope(theta=20000.0)}
_JINA_CODE = "jinaai/xlm-roberta-flash-implementation--"

REMOTE = (
    Entry(
        "nvidia/NV-Embed-v2",
        embedder(
            "MistralModel",
            {**shapes.MISTRAL, "sliding_window": None},
            tokenizer=bpe_tokenizer,
            unmasked=True,
            last_token="</s>",
            changes={"architectures": ["NVEmbedModel"], "model_type": "nvembed"},
            prepare=(nv_embed.around,),
            behind=nv_embed.latent_attention,
            tail=UNIT,
        ),
        "remote code: latent attention behind the layers",
    ),
    Entry(
        "jinaai/jina-embeddings-v3",
        embedder(
            "JinaEmbeddingsV3Model",
            _JINA_V3,
            tokenizer=unigram_tokenizer,
            prompts={"retrieval.query": "Represent the query for retrieving evidence documents: "},
            changes={
                "architectures": ["XLMRobertaModel"],
                "model_type": "xlm-roberta",
                "auto_map": {
                    "AutoConfig": f"{_JINA_CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
                    "AutoModel": f"{_JINA_CODE}modeling_lora.XLMRobertaLoRA",
                },
                "position_embedding_type": "rotary",
                "rope_theta": None,
                "rope_scaling": None,
                "rotary_emb_base": 20000.0,
            },
            prepare=(stored.jina_adapters,),
            options={"adapter": "retrieval.query"},
        ),
        "remote code: rotations, adapters by task",
    ),
    Entry(
        "jinaai/jina-embeddings-v3-hf",
        Structure(
            "embed",
            "JinaEmbeddingsV3Model",
            _JINA_V3,
            unigram_tokenizer,
            tokenizer_class="XLMRobertaTokenizer",
            options={"task": "embed", "pooling": "mean"},
            tail=UNIT,
        ),
        "transformers' own class, without adapters",
        unsure="the repository's name",
    ),
    Entry(
        "voyageai/voyage-4-nano",
        embedder(
            "Qwen3Model",
            shapes.QWEN3_06,
            tokenizer=tokenizers.plain,
            unmasked=True,
            changes={
                "architectures": ["Qwen3ForCausalLM"],
                "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
                "use_bidirectional_attention": True,
                "num_labels": 24,
            },
            prepare=(stored.one_layer,),
            behind=stored.one_layer_of,
        ),
        "remote code: Qwen3 that sees both ways, a layer behind it",
        unsure="names of class and file",
    ),
    Entry(
        "perplexity-ai/pplx-embed-v1-0.6b",
        remote("bidirectional_pplx_qwen3", "PPLXQwen3Model", "modeling.PPLXQwen3Model"),
        "remote code: Qwen3 that sees both ways, quantized vectors",
    ),
    Entry(
        "Kingsoft-LLM/QZhou-Embedding",
        remote("qwen2", "QZhouModel", "modeling_qzhou.QZhouModel"),
        "remote code: Qwen2 that sees both ways",
    ),
    Entry(
        "jinaai/jina-embeddings-v5-text-small",
        remote("jina_embeddings_v5", "JinaEmbeddingsV5Model", "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"),
        "remote code: adapters by task on Qwen3",
        unsure="the name of its file",
    ),
    Entry(
        "chandar-lab/NeoBERT",
        remote("neobert", "NeoBERTLMHead", "model.NeoBERT"),
        "remote code",
    ),
    Entry(
        "Salesforce/codet5p-110m-embedding",
        remote("codet5p_embedding", "CodeT5pEmbeddingModel", "modeling_codet5p_embedding.CodeT5pEmbeddingModel"),
        "remote code: T5's encoder and a linear layer",
    ),
    Entry(
        "Salesforce/SFR-Embedding-Code-400M_R",
        remote("codexembed400m", "CodeXEmbedModel400M", "modeling_gte.CodeXEmbedModel400M"),
        "remote code: GTE",
        unsure="names of class and type",
    ),
    Entry(
        "Lajavaness/bilingual-embedding-large",
        remote("bilingual", "BilingualModel", "dangvantuan/bilingual_impl--modeling.BilingualModel"),
        "remote code: XLM-RoBERTa under another name",
    ),
    Entry(
        "pfnet/plamo-embedding-1b",
        remote("plamo", "PlamoBiModel", "modeling_plamo.PlamoBiModel"),
        "remote code",
        unsure="names of class and type",
    ),
    Entry(
        "BAAI/bge-reranker-v2-minicpm-layerwise",
        remote("minicpm", "LayerWiseMiniCPMForCausalLM", "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM"),
        "remote code: a score at every layer",
    ),
    Entry(
        "BAAI/bge-reranker-v2.5-gemma2-lightweight",
        remote("cost_wise_gemma", "CostWiseGemmaForCausalLM", "gemma_model.CostWiseGemmaForCausalLM"),
        "remote code: tokens are merged between layers",
    ),
    Entry(
        "openbmb/MiniCPM-Embedding",
        remote("minicpm", "MiniCPMModel", "modeling_minicpm.MiniCPMModel"),
        "remote code",
        ("openbmb/MiniCPM-Reranker",),
    ),
    Entry(
        "jinaai/jina-reranker-v3",
        remote("qwen3", "JinaForRanking", "modeling.JinaForRanking"),
        "remote code: ranks all documents at once",
    ),
    Entry(
        "naver/splade-code-06B",
        remote("qwen3", "Splade", "splade.Splade"),
        "remote code: SPLADE on Qwen3",
        unsure="names of class and file",
    ),
)

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
_NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 16,
}
_MOE = shapes.decoder(4, 2, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

LANGUAGE_MODELS = (
    Entry(
        "meta-llama/Llama-3.2-1B",
        language_model("LlamaForCausalLM", {**shapes.LLAMA3, "tie_word_embeddings": True}, tokenizer=tokenizers.llama3),
        "read by its last token",
        ("meta-llama/Llama-Guard-3-1B",),
    ),
    Entry(
        "Qwen/Qwen2.5-0.5B-Instruct",
        language_model("Qwen2ForCausalLM", {**shapes.QWEN2_7, "tie_word_embeddings": True}),
        "read by its last token",
    ),
    Entry(
        "microsoft/Phi-3-mini-4k-instruct",
        language_model("Phi3ForCausalLM", shapes.decoder(4, 4, **shapes.rope(), sliding_window=40, eos_token_id=2)),
        "query, key and value in one; a window",
    ),
    Entry(
        "microsoft/Phi-4-mini-instruct",
        language_model(
            "Phi3ForCausalLM",
            shapes.decoder(
                6,
                2,
                **shapes.rope(partial_rotary_factor=0.75),
                tie_word_embeddings=True,
                hidden_size=48,
                eos_token_id=2,
            ),
        ),
        "a partial rotation",
        unsure="LongRoPE is left out here",
    ),
    Entry(
        "microsoft/phi-2",
        language_model("PhiForCausalLM", shapes.decoder(4, 4, **shapes.rope(partial_rotary_factor=0.5))),
        "attention beside the MLP, a partial rotation, LayerNorm",
    ),
    Entry(
        "HuggingFaceTB/SmolLM2-135M",
        language_model(
            "LlamaForCausalLM", shapes.decoder(9, 3, hidden_size=72, tie_word_embeddings=True, **shapes.rope())
        ),
        "nine heads",
    ),
    Entry(
        "HuggingFaceTB/SmolLM3-3B",
        language_model(
            "SmolLM3ForCausalLM",
            shapes.decoder(
                4,
                1,
                num_hidden_layers=4,
                no_rope_layer_interval=4,
                tie_word_embeddings=True,
                **shapes.rope(theta=5000000.0),
            ),
        ),
        "every fourth layer has no rotation",
    ),
    Entry(
        "ibm-granite/granite-3.3-2b-instruct",
        language_model(
            "GraniteForCausalLM",
            shapes.decoder(
                4,
                1,
                embedding_multiplier=12.0,
                attention_multiplier=0.125,
                residual_multiplier=0.22,
                logits_scaling=8.0,
                tie_word_embeddings=True,
                **shapes.rope(),
            ),
        ),
        "multipliers",
    ),
    Entry(
        "allenai/OLMo-2-0425-1B",
        language_model("Olmo2ForCausalLM", shapes.decoder(4, 4, **shapes.rope(theta=500000.0))),
        "norms behind attention and MLP, joint norms of queries and keys",
    ),
    Entry(
        "allenai/Olmo-3-1025-7B",
        language_model(
            "Olmo3ForCausalLM",
            shapes.decoder(4, 4, num_hidden_layers=4, sliding_window=16, **shapes.rope(theta=500000.0)),
        ),
        "OLMo 2 with windows",
    ),
    Entry(
        "allenai/OLMo-1B-hf",
        language_model("OlmoForCausalLM", shapes.decoder(4, 4, **shapes.rope(), tie_word_embeddings=True)),
        "LayerNorm without weights",
    ),
    Entry(
        "CohereLabs/c4ai-command-r-v01",
        language_model(
            "CohereForCausalLM",
            shapes.decoder(4, 1, logit_scale=0.0625, tie_word_embeddings=True, **shapes.rope(theta=8000000.0)),
        ),
        "attention beside the MLP, interleaved rotations",
    ),
    Entry(
        "CohereLabs/c4ai-command-r7b-12-2024",
        language_model(
            "Cohere2ForCausalLM",
            shapes.decoder(
                4,
                1,
                num_hidden_layers=4,
                sliding_window=16,
                sliding_window_pattern=4,
                tie_word_embeddings=True,
                **shapes.rope(theta=50000.0),
            ),
        ),
        "windows with rotations, full layers without",
    ),
    Entry(
        "zai-org/glm-4-9b-hf",
        language_model(
            "GlmForCausalLM",
            shapes.decoder(4, 1, head_dim=8, attention_bias=True, **shapes.rope(partial_rotary_factor=0.5)),
        ),
        "a partial, interleaved rotation",
    ),
    Entry(
        "zai-org/GLM-4-9B-0414",
        language_model("Glm4ForCausalLM", shapes.decoder(4, 1, head_dim=8, **shapes.rope(partial_rotary_factor=0.5))),
        "four norms a layer, a partial rotation",
    ),
    Entry(
        "jhu-clsp/ettin-decoder-150m",
        language_model(
            "ModernBertDecoderForCausalLM", {**shapes.MODERN, "tie_word_embeddings": True}, tokenizer=bpe_tokenizer
        ),
        "ModernBERT that reads from left to right",
    ),
    Entry(
        "bigcode/starcoder2-3b",
        language_model(
            "Starcoder2ForCausalLM",
            shapes.decoder(
                4, 1, use_bias=True, tie_word_embeddings=True, sliding_window=40, **shapes.rope(theta=999999.0)
            ),
        ),
        "LayerNorm, an MLP without a gate",
    ),
    Entry(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        language_model(
            "Exaone4ForCausalLM",
            shapes.decoder(4, 1, num_hidden_layers=4, tie_word_embeddings=True, **shapes.rope(theta=1000000.0)),
        ),
        "norms behind attention and MLP",
    ),
    Entry(
        "kyutai/helium-1-2b",
        language_model("HeliumForCausalLM", shapes.decoder(4, 2, head_dim=8, **shapes.rope())),
        "interleaved rotations",
    ),
    Entry(
        "stabilityai/stablelm-2-1_6b",
        language_model(
            "StableLmForCausalLM", shapes.decoder(4, 4, use_qkv_bias=True, **shapes.rope(partial_rotary_factor=0.25))
        ),
        "LayerNorm, a partial rotation",
    ),
    Entry(
        "nvidia/Nemotron-Mini-4B-Instruct",
        language_model(
            "NemotronForCausalLM", shapes.decoder(4, 1, hidden_act="relu2", **shapes.rope(partial_rotary_factor=0.5))
        ),
        "a squared ReLU, LayerNorm with one added",
    ),
    Entry(
        "tencent/Hunyuan-0.5B-Instruct",
        language_model(
            "HunYuanDenseV1ForCausalLM", shapes.decoder(4, 2, head_dim=8, tie_word_embeddings=True, **shapes.rope())
        ),
        "norms of queries and keys behind the rotation",
    ),
    Entry(
        "baidu/ERNIE-4.5-0.3B-PT",
        language_model(
            "Ernie4_5ForCausalLM",
            shapes.decoder(4, 1, head_dim=8, tie_word_embeddings=True, **shapes.rope(theta=500000.0)),
        ),
        "interleaved rotations",
    ),
    Entry(
        "LiquidAI/LFM2-350M",
        language_model(
            "Lfm2ForCausalLM",
            shapes.decoder(
                4, 2, layer_types=["conv", "full_attention"], tie_word_embeddings=True, **shapes.rope(theta=1000000.0)
            ),
        ),
        "convolutions between attention layers",
    ),
    Entry("openai-community/gpt2", language_model("GPT2LMHeadModel", _GPT2), "learned positions, Conv1D"),
    Entry(
        "Muennighoff/SGPT-125M-weightedmean-nli-bitfit",
        embedder("GPTNeoModel", _NEO, "weighted_mean", unit=False, tokenizer=tokenizers.plain),
        "a weighted mean",
    ),
    Entry(
        "EleutherAI/pythia-160m",
        language_model("GPTNeoXForCausalLM", {**shapes.ENCODER, "rotary_pct": 0.25}),
        "attention beside the MLP",
    ),
    Entry(
        "facebook/opt-125m",
        language_model("OPTForCausalLM", {**shapes.ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        "learned positions",
    ),
    Entry(
        "bigscience/sgpt-bloom-7b1-msmarco",
        embedder(
            "BloomModel",
            {"hidden_size": 32, "n_layer": 2, "n_head": 4},
            "weighted_mean",
            unit=False,
            tokenizer=tokenizers.plain,
        ),
        "ALiBi; a weighted mean",
    ),
    Entry(
        "tiiuae/falcon-7b",
        language_model(
            "FalconForCausalLM",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "multi_query": True,
                "parallel_attn": True,
                "bias": False,
                "alibi": False,
            },
        ),
        "one key for all heads",
    ),
    Entry("mistralai/Mixtral-8x7B-v0.1", language_model("MixtralForCausalLM", _MOE), "experts"),
    Entry(
        "Qwen/Qwen1.5-MoE-A2.7B",
        language_model("Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 16}),
        "experts",
    ),
    Entry("Qwen/Qwen3-30B-A3B", language_model("Qwen3MoeForCausalLM", {**_MOE, "head_dim": 8}), "experts"),
    Entry(
        "openai/gpt-oss-20b",
        language_model("GptOssForCausalLM", {**_MOE, "head_dim": 8, "sliding_window": 16}),
        "experts, sinks",
    ),
    Entry(
        "state-spaces/mamba-130m-hf",
        language_model("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        "a state space model",
    ),
    Entry(
        "RWKV/rwkv-4-169m-pile",
        language_model(
            "RwkvForCausalLM",
            {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 48},
        ),
        "a recurrent model",
    ),
)
