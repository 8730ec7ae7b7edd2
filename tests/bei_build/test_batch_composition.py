"""A text's vector does not depend on the other texts in its batch: the law of packing, on a real engine in FP32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Engine
from bei.tokenizer.encoder import TextEncoder
from tests.support.builds import build_artifact, embed, running
from tests.support.checkpoints import FAMILIES, MAX_TOKENS, POOLINGS, add_modules, save_checkpoint

TOLERANCE = 1e-5
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ODD_CHARACTERS = [
    "\u0301\u0323\u20dd",  # combining marks without a base
    "👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈",  # joined emoji
    "\u202eabc\u202c\u200f",  # direction overrides
    "\x00\x01\x7f\x85\ufeff\ufffd\ufffe",  # controls, byte order mark, non-characters
    "\t\n\r \u00a0\u2028\u3000",  # kinds of white space
    "ﬁ①Ⅷ𝔘㍿ẞİıΣς",  # characters that normalization or lower-casing changes
    "𠜎𐍈\U0010ffff",  # beyond the basic plane
    "東京ไทยދިވެހިሰላም",  # scripts without spaces
    "[CLS]</s><s>[MASK]",  # special tokens as text
]


@pytest.fixture(scope="session", params=FAMILIES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """All six pooling modes in one vector, so that the law is tested for each."""
    folder = tmp_path_factory.mktemp(f"composition-{request.param}")
    checkpoint = add_modules(save_checkpoint(folder / "checkpoint", request.param), tuple(POOLINGS))
    return build_artifact(checkpoint, folder / "artifact")


@pytest.fixture(scope="session")
def engine(artifact: Artifact) -> Iterator[Engine]:
    with running(artifact) as engine:
        yield engine


@pytest.fixture(scope="session")
def encoder(artifact: Artifact) -> TextEncoder:
    return TextEncoder(artifact.path / TOKENIZER, artifact.manifest.max_seq_len)


def assert_each_as_alone(engine: Engine, encodings: list[Encoding]) -> None:
    together = embed(engine, encodings)
    alone = np.concatenate([embed(engine, [encoding]) for encoding in encodings])
    assert np.isfinite(together).all()
    assert np.abs(together - alone).max() <= TOLERANCE


@quick
@given(lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=20), seed=st.integers(0, 2**32 - 1))
@example(lengths=[1] * 20, seed=0)
@example(lengths=[MAX_TOKENS] * 20, seed=1)
@example(lengths=[1, MAX_TOKENS], seed=2)
def test_a_sequence_gets_the_vector_it_gets_alone(engine: Engine, lengths: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    encodings = [
        Encoding(
            generator.integers(0, 64, length, np.int32),
            generator.integers(0, 2, length, np.int32) if generator.random() < 0.5 else None,
        )
        for length in lengths
    ]
    assert_each_as_alone(engine, encodings)


@quick
@given(texts=st.lists(st.text(max_size=80) | st.sampled_from(ODD_CHARACTERS), min_size=1, max_size=8))
@example(texts=ODD_CHARACTERS)
@example(texts=["", " ", "a", "the cat sat on a mat " * 30])
def test_a_text_gets_the_vector_it_gets_alone(
    engine: Engine, encoder: TextEncoder, artifact: Artifact, texts: list[str]
) -> None:
    encodings = encoder.encode(texts)
    for encoding in encodings:
        assert 1 <= encoding.num_tokens <= artifact.manifest.max_seq_len
        assert 0 <= encoding.input_ids.min() <= encoding.input_ids.max() < artifact.manifest.spec.vocab_size
    assert_each_as_alone(engine, encodings)


def test_the_order_of_a_batch_is_the_order_of_its_rows(engine: Engine) -> None:
    generator = np.random.default_rng(3)
    encodings = [Encoding(generator.integers(0, 64, length, np.int32)) for length in (9, 1, MAX_TOKENS, 9, 30)]
    forward, backward = embed(engine, encodings), embed(engine, encodings[::-1])
    assert np.abs(forward - backward[::-1]).max() <= TOLERANCE
    assert np.abs(forward[0] - forward[3]).max() > 0.1  # sequences of one length, yet their rows differ
