"""Texts of token ids, some of which begin alike: with the same prefix, and with prefixes within prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from bei.core import Encoding

MAX_TOKENS = 48  # shorter than the shortest limit of the tests' models


@st.composite
def texts_with_prefixes(draw: st.DrawFn, vocab_size: int = 100) -> list[list[int]]:
    """Each text begins as an earlier one does, for none to all of its tokens, and goes on by itself."""
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    plans = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 24)), min_size=1, max_size=12)
    )
    texts: list[list[int]] = []
    for partner, shared, own in plans:
        start = texts[partner % len(texts)][:shared] if texts else []
        text = [*start, *generator.integers(0, vocab_size, own).tolist()][:MAX_TOKENS]
        texts.append(text or [1])
    return texts


def encodings_with_prefixes(vocab_size: int = 100) -> st.SearchStrategy[list[Encoding]]:
    """Such texts as encodings."""
    return texts_with_prefixes(vocab_size).map(lambda texts: [Encoding(np.array(text, np.int32)) for text in texts])
