"""Rows of a batch: each sequence gets the outputs it asked for, cut where its tokens are."""

from __future__ import annotations

import numpy as np
import pytest

from bei.core import Encoding, Outputs, PackedBatch
from bei.port import UNIT_EMBEDDING
from bei.scheduler.execution import engine_outputs, rows_of_batch
from tests.support.engines import ids

BATCH = PackedBatch.from_encodings([Encoding(ids(1, 2)), Encoding(ids(3)), Encoding(ids(4, 5, 6))])
OUTPUTS: Outputs = {
    "embedding": np.array([[3, 4], [0, 2], [1, 0]], np.float32),
    "tokens": np.arange(12, dtype=np.float32).reshape(6, 2),
}
PER_TOKEN = frozenset({"tokens"})


@pytest.mark.parametrize(
    ("wanted", "computed"),
    [
        ({"embedding"}, {"embedding"}),
        ({UNIT_EMBEDDING}, {"embedding"}),
        ({UNIT_EMBEDDING, "tokens"}, {"embedding", "tokens"}),
        ({"tokens"}, {"tokens"}),
    ],
)
def test_the_engine_computes_what_the_rows_are_made_of(wanted: set[str], computed: set[str]) -> None:
    assert engine_outputs(wanted) == computed


def test_each_row_has_what_its_sequence_asked_for_and_nothing_else() -> None:
    wanted = [{"embedding"}, {"tokens"}, {UNIT_EMBEDDING, "tokens"}]
    rows = rows_of_batch(OUTPUTS, BATCH, wanted, PER_TOKEN)
    assert [set(row) for row in rows] == wanted
    assert rows[0]["embedding"].tolist() == [3, 4]
    assert rows[1]["tokens"].tolist() == [[4, 5]]
    assert rows[2][UNIT_EMBEDDING].tolist() == [1, 0]
    assert rows[2]["tokens"].tolist() == [[6, 7], [8, 9], [10, 11]]


def test_the_unit_embedding_has_length_one_and_the_embedding_stays_as_it_was() -> None:
    row = rows_of_batch(OUTPUTS, BATCH, [{"embedding", UNIT_EMBEDDING}] * 3, PER_TOKEN)[0]
    np.testing.assert_allclose(row[UNIT_EMBEDDING], [0.6, 0.8], rtol=1e-6)
    assert row["embedding"].tolist() == [3, 4]


def test_the_tokens_of_one_sequence_do_not_keep_those_of_the_batch() -> None:
    row = rows_of_batch(OUTPUTS, BATCH, [PER_TOKEN] * 3, PER_TOKEN)[0]
    assert row["tokens"].base is None
    assert not np.shares_memory(row["tokens"], OUTPUTS["tokens"])


def test_an_output_that_the_engine_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError):
        rows_of_batch(OUTPUTS, BATCH, [{"nothing"}] * 3, PER_TOKEN)
