"""Texts that are read again for pairs of their spans, which models score for relations (GLiNER2.5)."""

from __future__ import annotations

from bei.core import LabelVectors


class PairedText(str):
    """A text with the table of its ``pairs`` (``bei.engine.span_pairs``)."""

    pairs: LabelVectors

    def __new__(cls, text: str, pairs: LabelVectors) -> PairedText:
        found = super().__new__(cls, text)
        found.pairs = pairs
        return found
