"""Invalid inputs, and inputs that the engine fails on: errors of the call, or entries of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei import Report
from bei.engine.fake import FakeEngine
from bei.errors import (
    EmptyInputError,
    EngineError,
    InputTooLongError,
    InvalidImageError,
    InvalidRequestError,
    InvalidTextError,
    MalformedRequestError,
    NonFiniteOutputError,
)
from bei.offline.input_checks import text_or_pair
from tests.bei.offline.conftest import OpenModel
from tests.bei.offline.given import expected, texts
from tests.bei.offline.test_arrays import open_token_embedder
from tests.e2e.process import wait_until
from tests.support.artifacts import LIMITS, token_ids
from tests.support.engines import NaNEngine, PickyEngine


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ("", EmptyInputError, "inputs 1500 is an empty text"),
        (float("nan"), MalformedRequestError, "inputs 1500 has the type float, and must be a text"),
        (None, MalformedRequestError, r"inputs 1500 is null \(None\), and must be"),
        (b"cat", InvalidImageError, "inputs 1500 is an image"),
        (7, MalformedRequestError, "token ids of one input"),
        ([2, "a"], MalformedRequestError, "does not hold token ids alone"),
        ([2, 9999], InvalidRequestError, "Token ids must be from 0 to 127"),
        ([], InvalidRequestError, "token ids is empty"),
        ("cat \ud83d", InvalidTextError, "inputs 1500 has half a surrogate pair at 4"),
    ],
    ids=repr,
)
def test_a_wrong_input_is_named_and_with_a_report_costs_the_others_nothing(
    open_model: OpenModel, wrong: Any, kind: type[Exception], message: str
) -> None:
    engine = FakeEngine(LIMITS)
    model = open_model(engine)
    given = texts(1600)
    given[1500] = wrong
    num_steps = len(engine.batches)
    with pytest.raises(kind, match=message):
        model.embed(given)
    is_seen_at_once = not isinstance(wrong, list) or "a" in wrong
    assert (len(engine.batches) == num_steps) == is_seen_at_once
    report = Report()
    vectors = model.embed(given, report=report)
    assert isinstance(report.errors.pop(1500), kind)
    assert not report.errors
    assert not vectors[1500].any()
    del given[1500]
    np.testing.assert_allclose(np.delete(vectors, 1500, axis=0), expected(given), rtol=1e-6)


@pytest.mark.parametrize("wrong", [b"cat", "", [2], None], ids=repr)
def test_a_wrong_input_costs_the_vectors_of_others_tokens_nothing(
    open_model: OpenModel, tmp_path: Path, wrong: Any
) -> None:
    model, report = open_token_embedder(open_model, tmp_path), Report()
    found = model.embed_all(["cat", wrong, "the"], report=report)
    assert [len(vectors) for vectors in found] == [3, 0, 3]
    assert report.errors.keys() == {1}
    with pytest.raises(InvalidRequestError, match="inputs 1"):
        model.embed_all(["cat", wrong, "the"])


def test_pairs_are_tuples_or_lists_of_two() -> None:
    assert text_or_pair(["a", "b"], 0) == text_or_pair(("a", "b"), 0) == ("a", "b")
    for wrong in (("a",), ("a", "b", "c"), 1):
        with pytest.raises(MalformedRequestError, match="inputs 3 has the type"):
            text_or_pair(wrong, 3)
    with pytest.raises(EmptyInputError, match="inputs 3"):
        text_or_pair("", 3)
    assert text_or_pair(("a", ""), 3) == ("a", "")


def test_what_the_engine_fails_on_is_an_error_or_stands_in_the_report(open_model: OpenModel) -> None:
    poison = token_ids("z z")
    model = open_model(PickyEngine(LIMITS, lambda sequence: list(sequence) == poison))
    given = texts(400)
    given[333] = "z z"
    with pytest.raises(EngineError):
        model.embed(given)
    wait_until(lambda: model._runner.service.num_open == 0, "the others are given back")
    report = Report()
    vectors = model.embed(given, report=report)
    assert [(place, type(error)) for place, error in report.errors.items()] == [(333, EngineError)]
    assert vectors.any(axis=1).sum() == 399


def test_a_report_counts_and_names_what_was_cut(open_model: OpenModel) -> None:
    model = open_model(NaNEngine(LIMITS, token_ids("z")[1]))
    given = texts(300)
    given[7], given[280], given[290] = "cat " * 40, "hello " * 40, "z"
    report = Report()
    model.embed(given, report=report)
    assert report.num_inputs == 300
    assert report.truncated == [7, 280]
    assert [type(error) for error in report.errors.values()] == [NonFiniteOutputError]
    assert report.num_tokens == sum(len(token_ids(text)) for text in given) - len(token_ids("z"))
    with pytest.raises(InputTooLongError):
        model.embed(given[:10], truncate=False)
