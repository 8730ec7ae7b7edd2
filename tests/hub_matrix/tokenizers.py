"""Tokenizers of the repositories' kinds, small: what they put around a text, and the special tokens that they know."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, processors

from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer

# By the beginning of the model's class: the class that tokenizer_config.json names, where transformers puts
# settings of the class over those of tokenizer.json. For Gemma, Llama and ALBERT the small files stay as they are.
CLASSES = {
    "Albert": "PreTrainedTokenizerFast",
    "BigBird": "BigBirdTokenizer",
    "Camembert": "CamembertTokenizer",
    "CLIP": "CLIPTokenizer",
    "Cohere": "CohereTokenizer",
    "DebertaV2": "DebertaV2Tokenizer",
    "Deberta": "DebertaTokenizer",
    "Gemma": "PreTrainedTokenizerFast",
    "Llama": "PreTrainedTokenizerFast",
    "Luke": "LukeTokenizer",
    "MBart": "MBart50Tokenizer",
    "MPNet": "MPNetTokenizer",
    "MT5": "T5Tokenizer",
    "OlmoFor": "GPTNeoXTokenizer",
    "RemBert": "RemBertTokenizer",
    "T5": "T5Tokenizer",
    "UMT5": "T5Tokenizer",
}


def framed(tokenizer: Tokenizer, single: str, *tokens: str) -> Tokenizer:
    """``tokenizer`` with ``tokens`` around every text, as ``single`` says; those it does not know are added."""
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    named = [(token, tokenizer.token_to_id(token)) for token in tokens]
    pair = single.replace("$A", "$A $B:1")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    return tokenizer


def t5() -> Tokenizer:
    """T5's: only an end."""
    return framed(unigram_tokenizer(), "$A </s>", "</s>")


def llama3() -> Tokenizer:
    """Llama 3's: only a beginning."""
    return framed(bpe_tokenizer(), "<|begin_of_text|> $A", "<|begin_of_text|>")


def mistral() -> Tokenizer:
    """Mistral's: only a beginning."""
    return framed(bpe_tokenizer(), "<s> $A", "<s>")


def plain() -> Tokenizer:
    """Qwen's and GPT-2's: nothing around a text."""
    tokenizer = bpe_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens(["yes", "no", "Yes", "No", "0", "1"])
    return tokenizer


def guard() -> Tokenizer:
    """Qwen's, with the words that guards answer with."""
    tokenizer = plain()
    tokenizer.add_tokens(["safe", "unsafe", "ĠSafe", "ĠUnsafe", "ĠCont"])
    return tokenizer


def ends_in_text_end() -> Tokenizer:
    """Qwen3-Embedding's: an end behind every text."""
    return framed(bpe_tokenizer(), "$A <|endoftext|>", "<|endoftext|>")


def clip() -> Tokenizer:
    """CLIP's: the end of a text has the highest id, and is the unknown token."""
    tokenizer = framed(bpe_tokenizer(), "<|startoftext|> $A <|endoftext|>", "<|startoftext|>", "<|endoftext|>")
    model = json.loads(tokenizer.to_str())
    model["model"]["vocab"] |= {token: tokenizer.token_to_id(token) for token in ("<|startoftext|>", "<|endoftext|>")}
    return Tokenizer.from_str(json.dumps(model))


def gemma() -> Tokenizer:
    """Gemma's: a beginning and an end."""
    return framed(unigram_tokenizer(), "<bos> $A <eos>", "<bos>", "<eos>")


def gemma_lm() -> Tokenizer:
    """Gemma's as a language model: only a beginning."""
    return framed(unigram_tokenizer(), "<bos> $A", "<bos>")


def gemma_words() -> Tokenizer:
    """Gemma's with words as the tokens that count."""
    tokenizer = gemma_lm()
    tokenizer.add_tokens(["Yes", "No"])
    return tokenizer


def mbart() -> Tokenizer:
    """mBART's: an end and the language behind a text."""
    return framed(unigram_tokenizer(), "$A </s> en_XX", "</s>", "en_XX")


def mpnet() -> Tokenizer:
    """MPNet's: BERT's words, RoBERTa's place of the padding."""
    model = json.loads(wordpiece_tokenizer().to_str())
    model["model"]["vocab"].update({"[PAD]": 1, "[UNK]": 0})
    for token in model["added_tokens"]:
        token["id"] = model["model"]["vocab"][token["content"]]
    return Tokenizer.from_str(json.dumps(model))


def pylate() -> Tokenizer:
    """ModernBERT's, with PyLate's markers as tokens."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    return tokenizer


def gemma_pylate() -> Tokenizer:
    """mmBERT's, which is Gemma's, with PyLate's markers as tokens."""
    tokenizer = gemma()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    return tokenizer


def unused() -> Tokenizer:
    """BERT's, with tokens that have no use."""
    model = json.loads(wordpiece_tokenizer().to_str())
    vocabulary = model["model"]["vocab"]
    vocabulary.update({f"[unused{index}]": len(vocabulary) + index for index in range(2)})
    return Tokenizer.from_str(json.dumps(model))
