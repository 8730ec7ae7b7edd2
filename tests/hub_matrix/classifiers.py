"""Sentiment, zero-shot entailment, safety, named entities, reward models."""

from __future__ import annotations

from typing import Any

import torch

from tests.hub_matrix import shapes, stored, tokenizers
from tests.hub_matrix.rankers import reranker
from tests.hub_matrix.structures import Entry, Structure
from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer


def classifier(hf_class: str, settings: dict[str, Any], labels: int, **more: Any) -> Structure:
    """Several labels, by their softmax."""
    return Structure("classify", hf_class, settings, labels=labels, **more)


def tagger(hf_class: str, settings: dict[str, Any], labels: int = 9, **more: Any) -> Structure:
    """Labels of tokens."""
    return Structure("classify_tokens", hf_class, settings, labels=labels, **more)


def bert(labels: int, **more: Any) -> Structure:
    """BERT's."""
    return classifier("BertForSequenceClassification", shapes.ENCODER, labels, **more)


def roberta(labels: int, **more: Any) -> Structure:
    """RoBERTa's."""
    return classifier("RobertaForSequenceClassification", shapes.ROBERTA, labels, tokenizer=bpe_tokenizer, **more)


def xlm(labels: int, **more: Any) -> Structure:
    """XLM-RoBERTa's."""
    return classifier(
        "XLMRobertaForSequenceClassification", shapes.ROBERTA, labels, tokenizer=unigram_tokenizer, **more
    )


def distilbert(labels: int, **more: Any) -> Structure:
    """DistilBERT's."""
    return classifier("DistilBertForSequenceClassification", shapes.DISTILBERT, labels, **more)


def deberta(labels: int, **more: Any) -> Structure:
    """DeBERTa v3's."""
    settings = {**shapes.DEBERTA, **more.pop("settings", {})}
    return classifier("DebertaV2ForSequenceClassification", settings, labels, tokenizer=unigram_tokenizer, **more)


_MULTI_LABEL: dict[str, Any] = {"changes": {"problem_type": "multi_label_classification"}, "function": "sigmoid"}

SENTIMENT_AND_TOPICS = (
    Entry(
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        distilbert(2),
        "two labels",
        ("lxyuan/distilbert-base-multilingual-cased-sentiments-student", "tabularisai/multilingual-sentiment-analysis"),
    ),
    Entry(
        "cardiffnlp/twitter-roberta-base-sentiment-latest",
        roberta(3),
        "three labels",
        (
            "siebert/sentiment-roberta-large-english",
            "j-hartmann/emotion-english-distilroberta-base",
            "mrm8488/distilroberta-finetuned-financial-news-sentiment-analysis",
            "cardiffnlp/twitter-roberta-base-irony",
        ),
    ),
    Entry(
        "cardiffnlp/twitter-xlm-roberta-base-sentiment",
        xlm(3),
        "three labels",
        ("papluca/xlm-roberta-base-language-detection", "cardiffnlp/twitter-xlm-roberta-base-sentiment-multilingual"),
    ),
    Entry(
        "nlptown/bert-base-multilingual-uncased-sentiment",
        bert(5),
        "five labels",
        ("ProsusAI/finbert", "yiyanghkust/finbert-tone", "bhadresh-savani/bert-base-uncased-emotion"),
    ),
    Entry(
        "SamLowe/roberta-base-go_emotions",
        roberta(28, **_MULTI_LABEL),
        "labels are independent",
        ("cardiffnlp/tweet-topic-21-multi", "unitary/unbiased-toxic-roberta"),
    ),
    Entry(
        "unitary/toxic-bert",
        bert(6, **_MULTI_LABEL),
        "labels are independent",
        unsure="whether problem_type is in its config.json; the card reads the labels as independent",
    ),
    Entry(
        "HuggingFaceFW/fineweb-edu-classifier",
        Structure("rerank", "BertForSequenceClassification", shapes.ENCODER, labels=1, function="sigmoid"),
        "one label, a regression",
        unsure="it has no problem_type, so bei answers sigmoids unless raw scores are asked for",
    ),
    Entry(
        "cmarkea/distilcamembert-base-sentiment",
        classifier("CamembertForSequenceClassification", shapes.ROBERTA, 5, tokenizer=unigram_tokenizer),
        "CamemBERT",
    ),
    Entry(
        "textattack/albert-base-v2-yelp-polarity",
        classifier("AlbertForSequenceClassification", shapes.ALBERT, 2, tokenizer=unigram_tokenizer),
        "ALBERT",
        ("textattack/albert-base-v2-imdb",),
    ),
)

ENTAILMENT = (
    Entry(
        "facebook/bart-large-mnli",
        classifier(
            "BartForSequenceClassification",
            {**shapes.BART, "num_hidden_layers": 2},
            3,
            tokenizer=bpe_tokenizer,
            pairs=True,
        ),
        "the state of the decoder's last end of a sentence",
    ),
    Entry(
        "valhalla/distilbart-mnli-12-1",
        classifier(
            "BartForSequenceClassification",
            {**shapes.BART, "encoder_layers": 3, "decoder_layers": 1},
            3,
            tokenizer=bpe_tokenizer,
            pairs=True,
        ),
        "fewer layers in the decoder",
        ("valhalla/distilbart-mnli-12-3", "valhalla/distilbart-mnli-12-6"),
    ),
    Entry(
        "MoritzLaurer/DeBERTa-v3-base-mnli-fever-anli",
        deberta(3, pairs=True),
        "pairs without token types",
        (
            "MoritzLaurer/mDeBERTa-v3-base-mnli-xnli",
            "MoritzLaurer/mDeBERTa-v3-base-xnli-multilingual-nli-2mil7",
            "MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli",
            "cross-encoder/nli-deberta-v3-base",
            "cross-encoder/nli-deberta-v3-small",
            "cross-encoder/nli-deberta-v3-large",
            "knowledgator/comprehend_it-base",
        ),
    ),
    Entry(
        "MoritzLaurer/deberta-v3-large-zeroshot-v2.0",
        deberta(2, pairs=True, stored=torch.float16),
        "two labels, stored in float16",
        ("MoritzLaurer/deberta-v3-base-zeroshot-v2.0",),
    ),
    Entry(
        "MoritzLaurer/bge-m3-zeroshot-v2.0",
        xlm(2, pairs=True),
        "two labels",
        ("joeddav/xlm-roberta-large-xnli", "MoritzLaurer/multilingual-MiniLMv2-L6-mnli-xnli"),
    ),
    Entry(
        "FacebookAI/roberta-large-mnli",
        roberta(3, pairs=True),
        "three labels",
        ("cross-encoder/nli-roberta-base", "cross-encoder/nli-distilroberta-base", "cross-encoder/nli-MiniLM2-L6-H768"),
    ),
    Entry(
        "MoritzLaurer/ModernBERT-large-zeroshot-v2.0",
        classifier("ModernBertForSequenceClassification", shapes.MODERN, 2, tokenizer=bpe_tokenizer, pairs=True),
        "ModernBERT",
        ("tasksource/ModernBERT-base-nli",),
    ),
    Entry(
        "microsoft/deberta-large-mnli",
        classifier("DebertaForSequenceClassification", shapes.DEBERTA_V1, 3, tokenizer=bpe_tokenizer, pairs=True),
        "DeBERTa v1: query, key and value in one",
        ("microsoft/deberta-base-mnli", "microsoft/deberta-xlarge-mnli"),
    ),
    Entry(
        "microsoft/deberta-v2-xlarge-mnli",
        deberta(3, pairs=True, settings={"conv_kernel_size": 3, "conv_act": "gelu"}),
        "a convolution behind the first layer",
        ("microsoft/deberta-v2-xxlarge-mnli",),
    ),
    Entry(
        "squeezebert/squeezebert-mnli",
        classifier(
            "SqueezeBertForSequenceClassification",
            {
                **shapes.ENCODER,
                "embedding_size": 32,
                **dict.fromkeys(("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 4),
            },
            3,
            pairs=True,
        ),
        "convolutions in groups",
    ),
)

SAFETY = (
    Entry(
        "meta-llama/Llama-Prompt-Guard-2-86M",
        deberta(2),
        "DeBERTa v3",
        (
            "protectai/deberta-v3-base-prompt-injection-v2",
            "deepset/deberta-v3-base-injection",
            "meta-llama/Prompt-Guard-86M",
            "KoalaAI/Text-Moderation",
        ),
    ),
    Entry("meta-llama/Llama-Prompt-Guard-2-22M", deberta(2, settings={"num_attention_heads": 2}), "heads of 64 in 384"),
    Entry(
        "qualifire/prompt-injection-sentinel",
        classifier("ModernBertForSequenceClassification", shapes.MODERN, 2, tokenizer=bpe_tokenizer),
        "ModernBERT",
    ),
    Entry(
        "facebook/roberta-hate-speech-dynabench-r4-target",
        roberta(2),
        "two labels",
        (
            "openai-community/roberta-base-openai-detector",
            "s-nlp/roberta_toxicity_classifier",
            "ibm-granite/granite-guardian-hap-38m",
            "Hello-SimpleAI/chatgpt-detector-roberta",
        ),
    ),
    Entry("martin-ha/toxic-comment-model", distilbert(2), "two labels", ("madhurjindal/Jailbreak-Detector",)),
    Entry("jackhhao/jailbreak-classifier", bert(2), "two labels", ("JungleLee/bert-toxic-comment-classification",)),
)

NAMED_ENTITIES = (
    Entry(
        "dslim/bert-base-NER",
        tagger("BertForTokenClassification", shapes.ENCODER),
        "nine labels",
        (
            "dslim/bert-large-NER",
            "dbmdz/bert-large-cased-finetuned-conll03-english",
            "Davlan/bert-base-multilingual-cased-ner-hrl",
            "vblagoje/bert-english-uncased-finetuned-pos",
            "StanfordAIMI/stanford-deidentifier-base",
            "ckiplab/bert-base-chinese-ner",
        ),
    ),
    Entry(
        "d4data/biomedical-ner-all",
        tagger("DistilBertForTokenClassification", shapes.DISTILBERT, 84),
        "84 labels",
        (
            "dslim/distilbert-NER",
            "elastic/distilbert-base-cased-finetuned-conll03-english",
            "Isotonic/distilbert_finetuned_ai4privacy_v2",
        ),
    ),
    Entry(
        "Jean-Baptiste/roberta-large-ner-english",
        tagger("RobertaForTokenClassification", shapes.ROBERTA, 5, tokenizer=bpe_tokenizer),
        "labels without B-",
        ("obi/deid_roberta_i2b2", "tner/roberta-large-ontonotes5"),
    ),
    Entry(
        "FacebookAI/xlm-roberta-large-finetuned-conll03-english",
        tagger("XLMRobertaForTokenClassification", shapes.ROBERTA, 8, tokenizer=unigram_tokenizer),
        "eight labels",
        (
            "Davlan/xlm-roberta-base-ner-hrl",
            "oliverguhr/fullstop-punctuation-multilang-large",
            "microsoft/llmlingua-2-xlm-roberta-large-meetingbank",
        ),
    ),
    Entry(
        "Jean-Baptiste/camembert-ner",
        tagger("CamembertForTokenClassification", shapes.ROBERTA, 5, tokenizer=unigram_tokenizer),
        "labels without B-",
        ("Jean-Baptiste/camembert-ner-with-dates",),
    ),
    Entry(
        "iiiorg/piiranha-v1-detect-personal-information",
        tagger("DebertaV2ForTokenClassification", shapes.DEBERTA, 18, tokenizer=unigram_tokenizer),
        "DeBERTa v3",
        ("blaze999/Medical-NER", "Isotonic/mdeberta-v3-base_finetuned_ai4privacy_v2"),
    ),
    Entry(
        "KRLabsOrg/lettucedect-base-modernbert-en-v1",
        tagger("ModernBertForTokenClassification", shapes.MODERN, 2, tokenizer=bpe_tokenizer),
        "ModernBERT",
    ),
    Entry(
        "lakshyakh93/deberta_finetuned_pii",
        tagger("DebertaForTokenClassification", shapes.DEBERTA_V1, 60, tokenizer=bpe_tokenizer),
        "DeBERTa v1",
    ),
)

_REWARD_TOKENIZER = {"tokenizer": tokenizers.llama3}

REWARDS = (
    Entry(
        "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2",
        reranker("LlamaForSequenceClassification", shapes.LLAMA3, **_REWARD_TOKENIZER),
        "one label on the last token",
        (
            "allenai/Llama-3.1-Tulu-3-8B-RM",
            "Skywork/Skywork-Reward-V2-Llama-3.1-8B",
            "Skywork/Skywork-Reward-V2-Llama-3.2-1B",
            "NCSOFT/Llama-3-OffsetBias-RM-8B",
            "sfairXC/FsfairX-LLaMA3-RM-v0.1",
            "Ray2333/GRM-Llama3.2-3B-rewardmodel-ft",
        ),
    ),
    Entry(
        "Skywork/Skywork-Reward-Gemma-2-27B-v0.2",
        reranker("Gemma2ForSequenceClassification", shapes.GEMMA2, tokenizer=tokenizers.gemma_lm),
        "soft caps",
        ("Ray2333/GRM-gemma2-2B-rewardmodel-ft",),
    ),
    Entry(
        "Skywork/Skywork-Reward-V2-Qwen3-8B",
        reranker("Qwen3ForSequenceClassification", shapes.QWEN3_8, tokenizer=tokenizers.plain),
        "one label on the last token",
        ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "Skywork/Skywork-Reward-V2-Qwen3-4B"),
    ),
    Entry(
        "weqweasdas/RM-Mistral-7B",
        reranker("MistralForSequenceClassification", shapes.MISTRAL, tokenizer=tokenizers.mistral),
        "one label on the last token",
        ("Ray2333/reward-model-Mistral-7B-instruct-Unified-Feedback",),
    ),
    Entry(
        "OpenAssistant/reward-model-deberta-v3-large-v2",
        reranker("DebertaV2ForSequenceClassification", shapes.DEBERTA, tokenizer=unigram_tokenizer),
        "pairs of a question and an answer",
        ("OpenAssistant/reward-model-deberta-v3-base",),
    ),
    Entry(
        "allenai/OLMo-2-1124-7B-RM",
        reranker(
            "Olmo2ForSequenceClassification",
            shapes.decoder(4, 4, **shapes.rope(theta=500000.0)),
            tokenizer=tokenizers.plain,
        ),
        "norms behind attention and MLP",
    ),
    Entry(
        "Qwen/Qwen2.5-Math-RM-72B",
        Structure(
            "rerank",
            "Qwen2Model",
            shapes.QWEN2_7,
            tokenizers.plain,
            changes={
                "architectures": ["Qwen2ForRewardModel"],
                "auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"},
            },
            prepare=(stored.two_layers,),
            behind=stored.two_layers_of,
            function="sigmoid",
        ),
        "remote code: two layers on the last token",
        ("Qwen/WorldPM-72B-HelpSteer2",),
    ),
    Entry(
        "RLHFlow/ArmoRM-Llama3-8B-v0.1",
        Structure(
            "rerank",
            files={
                "config.json": {
                    "model_type": "llama",
                    "architectures": ["LlamaForRewardModelWithGating"],
                    "auto_map": {"AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating"},
                }
            },
        ),
        "remote code: 19 rewards and a gate",
    ),
    Entry(
        "internlm/internlm2-1_8b-reward",
        Structure(
            "rerank",
            files={
                "config.json": {
                    "model_type": "internlm2",
                    "architectures": ["InternLM2ForRewardModel"],
                    "auto_map": {"AutoModel": "modeling_internlm2.InternLM2ForRewardModel"},
                }
            },
        ),
        "remote code",
        ("internlm/internlm2-7b-reward",),
    ),
    Entry(
        "openbmb/Eurus-RM-7b",
        Structure(
            "rerank",
            files={
                "config.json": {
                    "model_type": "mistral",
                    "architectures": ["EurusRewardModel"],
                    "auto_map": {"AutoModel": "modeling_eurus_rm.EurusRewardModel"},
                }
            },
        ),
        "remote code",
    ),
    Entry(
        "infly/INF-ORM-Llama3.1-70B",
        Structure(
            "rerank",
            files={"config.json": {"model_type": "llama", "architectures": ["INFORMForSequenceClassification"]}},
        ),
        "a class of its own: two layers on the last token",
    ),
)
