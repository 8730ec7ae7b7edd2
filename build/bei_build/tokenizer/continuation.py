"""How a text continues another one in tokens when both are tokenized by themselves."""

from __future__ import annotations

from tokenizers import Tokenizer


def continuing(option: str, tokenizer: Tokenizer) -> str:
    """``option`` without its leading blank where the tokenizer puts one in front of every text by itself (a normalizer
    that prepends, as Llama 2 has): the option would have two."""

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    joined = ids("a a")
    own = option.startswith(" ") and joined != ids("a") + ids(" a") and joined == ids("a") + ids("a")
    return option[1:] if own else option
