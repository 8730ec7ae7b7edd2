"""Texts into which a request's inputs are put before a language model reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def filled(body: str, parts: Mapping[str, str]) -> str:
    """``body`` with the ``parts`` in its slots of their names; text that looks like a slot stays as it is."""
    return re.sub(r"\{(" + "|".join(parts) + r")\}", lambda slot: parts[slot[1]], body)


_SLOT = re.compile(r"\{(query|document|instruction)\}")


class PairTemplate(NamedTuple):
    """The text in which a language model reads a pair: ``body`` with ``{query}``, ``{document}``, ``{instruction}``."""

    body: str
    instruction: str

    @property
    def num_chars(self) -> int:
        """Without the pair."""
        return len(self.filled(("", "")))

    def filled(self, pair: str | tuple[str, str]) -> str:
        """``body`` with the pair inserted; text that looks like a slot stays as it is."""
        return filled(self.body, {"query": pair[0], "document": pair[1], "instruction": self.instruction})

    def parts(self, sides: Mapping[str, Seq[T]]) -> list[T | str]:
        """``body`` with the parts of each side in its slot, in order."""
        found: list[T | str] = []
        for index, piece in enumerate(_SLOT.split(self.body)):  # texts and names of slots take turns
            is_side = index % 2 and piece in sides
            found += sides[piece] if is_side else [self.instruction if index % 2 else piece]
        return found


class TextTemplate(NamedTuple):
    """The text in which a language model reads an input: ``body`` with ``{text}``, or ``{text}`` and ``{response}`` for
    a pair."""

    body: str

    @property
    def num_chars(self) -> int:
        """Without the input."""
        return len(self.filled(""))

    def filled(self, value: str | tuple[str, str]) -> str:
        """``body`` with the input inserted; text that looks like a slot stays as it is."""
        text, response = (value, "") if isinstance(value, str) else value
        return filled(self.body, {"text": text, "response": response})


class AroundTemplate(NamedTuple):
    """What stands in front of a text and behind it."""

    before: str
    behind: str

    @property
    def num_chars(self) -> int:
        """Without the text."""
        return len(self.filled(""))

    def filled(self, text: str | tuple[str, str]) -> str:
        """``text`` between the two."""
        assert isinstance(text, str)  # the only inputs that it is for
        return f"{self.before}{text}{self.behind}"
