"""A Model in the caller's process: lists, streams, progress, options and settings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from bei import Chunk, Model, Predictions, Rank, Report, SparseVector
from bei.artifact.manifest import Artifact
from bei.core import Float32Array
from bei.engine.fake import FakeEngine
from bei.errors import (
    ArtifactHashMismatchError,
    ConfigError,
    EmptyInputError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
    MalformedRequestError,
)
from bei.offline import windows as flow
from bei.offline.input_checks import TextOrPicture
from tests.bei.offline.conftest import OpenModel
from tests.bei.offline.given import expected, own_threads, texts
from tests.e2e.process import wait_until
from tests.support.artifacts import LIMITS, expected_vectors, save_artifact, token_ids
from tests.support.engines import DEADLINE_S, GatedEngine

if TYPE_CHECKING:
    from typing_extensions import assert_type

# Lists and streams.


@pytest.mark.parametrize("count", [1, 8, 300, 1500])
def test_a_list_has_a_row_for_each_input_in_order(model: Model, count: int) -> None:
    given = texts(count)
    vectors = model.embed(given)
    assert vectors.dtype == np.float32
    assert vectors.shape == (count, 8)
    np.testing.assert_allclose(vectors, expected(given), rtol=1e-6)


def test_any_iterable_will_do_and_one_text_is_a_list_of_one(model: Model) -> None:
    given = texts(600)
    np.testing.assert_array_equal(model.embed(iter(given)), model.embed(given))
    np.testing.assert_array_equal(model.embed(np.array(given)), model.embed(given))
    np.testing.assert_array_equal(model.embed("cat"), model.embed(["cat"]))
    np.testing.assert_array_equal(model.embed([[2, 9, 3], "cat"]), expected_vectors([[2, 9, 3], token_ids("cat")]))


def test_a_stream_gives_chunks_with_their_inputs(model: Model) -> None:
    given = texts(700)
    chunks = list(model.embed_iter(iter(given), chunk_size=150))
    assert [chunk.start for chunk in chunks] == [0, 150, 300, 450, 600]
    assert [text for chunk in chunks for text in chunk.inputs] == given
    np.testing.assert_array_equal(np.concatenate([chunk.results for chunk in chunks]), model.embed(given))


def test_a_stream_gives_what_is_there_before_its_source_ends(model: Model) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield from texts(100)

    stream = model.embed_iter(endless(), chunk_size=10)
    for start in range(0, 3000, 10):
        chunk = next(stream)
        assert chunk.start == start
    del stream
    wait_until(lambda: model._runner.service.num_open == 0, "what was under way is given back")


def test_a_call_reads_only_so_far_ahead(open_model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_MOST_INPUTS", 64)
    engine = GatedEngine(LIMITS)
    model = open_model(engine)
    num_read = num_given = most_ahead = 0

    def counted() -> Iterator[str]:
        nonlocal num_read, most_ahead
        for text in texts(1000):
            num_read += 1
            most_ahead = max(most_ahead, num_read - num_given)
            yield text

    def read() -> None:
        nonlocal num_given
        for chunk in model.embed_iter(counted(), chunk_size=8):
            num_given += len(chunk.inputs)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: num_read == 64, "as much as may be under way is read")
    assert not num_given
    engine.open()
    reader.join(DEADLINE_S)
    assert (num_read, num_given) == (1000, 1000)
    assert most_ahead == 64


def test_long_texts_count_by_their_tokens_and_wide_answers_by_their_bytes() -> None:
    plain, wide = flow.bounds(256, 0), flow.bounds(256, 4 * 768)
    assert plain.tokens == 1 << 20
    assert wide.tokens * 4 * 768 <= 64 << 20
    cutter = flow.Cutter(lambda value, _: str(value), len, wide, None)
    windows = [window for window in [*map(cutter.add, ["a" * 1000] * 100), cutter.rest()] if window]
    assert {len(window.inputs) for window in windows[:-1]} == {-(-wide.window_tokens // 1000)}
    assert [window.start for window in windows] == [
        sum(len(w.inputs) for w in windows[:i]) for i in range(len(windows))
    ]
    assert sum(len(window.inputs) for window in windows) == 100


def test_what_the_source_raises_ends_the_call_and_gives_back_what_was_under_way(open_model: OpenModel) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)

    def broken() -> Iterator[str]:
        yield from texts(600)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        model.embed(broken())
    wait_until(lambda: model._runner.service.num_open == 0, "what was under way is given back")


async def aiter_of() -> AsyncIterator[str]:
    yield "cat"


@pytest.mark.parametrize("given", [[], iter([])], ids=["a list", "an iterator"])
def test_no_input_at_all_is_an_error(model: Model, given: Any) -> None:
    with pytest.raises(EmptyInputError, match="inputs is empty"):
        model.embed(given)


@pytest.mark.parametrize(
    "given",
    [None, 5, aiter_of(), np.array("cat"), np.array(5)],
    ids=["None", "a number", "an asynchronous iterator", "an array of one text", "an array of one number"],
)
def test_what_cannot_be_iterated_is_refused(model: Model, given: Any) -> None:
    for method in (model.embed, model.encode, model.embed_iter):
        with pytest.raises(MalformedRequestError, match="must be a text, or texts in a list or an iterator"):
            method(given)


@pytest.mark.parametrize("given", [np.array("cat"), [np.array("cat")], [[np.array(2)]], [[True, False]]])
def test_arrays_of_one_value_and_truths_are_no_texts_and_no_ids(model: Model, given: Any) -> None:
    """An array without dimensions was a TypeError of numpy's, and truths were the ids 1 and 0."""
    with pytest.raises(MalformedRequestError, match="inputs"):
        model.embed(given)


@pytest.mark.parametrize("given", ["cat", [["cat"]], [[1.0], [2.0, 3.0]], np.array(1.0), None])
def test_what_is_no_vectors_is_not_compared(model: Model, given: Any) -> None:
    for first, second, name in ((given, [[1.0]], "first"), ([[1.0]], given, "second")):
        with pytest.raises(InvalidRequestError, match=f"{name} must be vectors"):
            model.similarity(first, second)


# Progress, options, settings.


def test_progress_is_told_in_the_caller_s_thread(model: Model) -> None:
    seen: list[tuple[int, int | None]] = []
    threads = set()

    def progress(done: int, total: int | None) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    model.embed(texts(600), progress=progress)
    assert seen == [(256, 600), (512, 600), (600, 600)]
    model.embed(iter(texts(300)), progress=progress)
    assert seen[3:] == [(256, None), (300, None)]
    assert threads == {threading.get_ident()}


def test_a_bar_is_drawn_on_standard_error(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    model.embed(texts(300), progress=True)
    shown = capsys.readouterr()
    assert not shown.out
    assert "embed" in shown.err
    assert "300/300" in shown.err


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"dimension": 4}, "dimension", "Did you mean 'dimensions'"),
        ({"zzz": 4}, "zzz", "Known options: add_special_tokens"),
        ({"top_k": 4}, "top_k", "no option 'top_k'"),
        ({"truncate_dim": 3}, "truncate_dim", r"no option 'truncate_dim' here\. Use 'dimensions'\."),
        ({"dimensions": "4"}, "dimensions", "dimensions is not valid: Expected `int"),
        ({"dimensions": 0}, "dimensions", "Expected `int` >= 1"),
        ({"output_dtype": "float64"}, "output_dtype", "Invalid enum value 'float64'"),
        ({"lane": "fast"}, "lane", "Invalid enum value 'fast'"),
        ({"timeout_s": -1}, "timeout_s", "Expected `float` > 0"),
        ({"report": {}}, "report", "report must be a Report"),
        ({"progress": "bar"}, "progress", "progress must be True, False, or a function"),
        ({"prompt": "cut \ud83d"}, "prompt", "prompt has half a surrogate pair at 4"),
    ],
    ids=str,
)
def test_an_option_that_is_unknown_or_wrong_is_refused_by_name(
    model: Model, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        model.embed(["a"], **options)
    assert caught.value.param == param


@pytest.mark.parametrize("given", [{"a", "b"}, frozenset("ab"), {"text": "a"}], ids=lambda given: type(given).__name__)
def test_what_has_no_order_or_would_be_read_by_its_keys_is_refused(model: Model, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"inputs has the type {type(given).__name__}, and must be"):
        model.embed(given)
    with pytest.raises(InvalidRequestError, match="inputs has the type"):
        next(iter(model.embed_iter(given)))
    assert model.embed(dict.fromkeys("ab").keys()).shape[0] == 2


class Frame(list[str]):
    """Iterated as pandas' DataFrame is: by the names of its columns."""

    columns = ("text", "label")

    def iterrows(self) -> Iterator[tuple[int, object]]:
        raise AssertionError("it was read")


def test_a_data_frame_is_refused_and_a_column_of_it_is_read(model: Model) -> None:
    """The names of its columns were embedded."""
    for method in (model.embed, model.encode):
        with pytest.raises(InvalidRequestError, match="inputs has the type Frame"):
            method(Frame(Frame.columns))
    assert model.embed(np.array(["a", "b"])).shape[0] == 2


def test_a_stream_refuses_its_options_before_anything_is_read(model: Model) -> None:
    def unread() -> Iterator[str]:
        yield from ()
        raise AssertionError("it was read")

    for options in ({"chunk_size": 0}, {"dimensions": 99}):
        with pytest.raises(InvalidRequestError):
            model.embed_iter(unread(), **options)  # type: ignore[arg-type]


def test_a_model_with_prompts_warns_where_its_caller_says_nothing(open_model: OpenModel, tmp_path: Path) -> None:
    path = save_artifact(tmp_path / "prompted", prompts={"query": "query: "}).path
    model = open_model(FakeEngine(LIMITS), path)
    with pytest.warns(UserWarning, match="tiny has prompts and got none") as caught:
        model.embed(["cat"])
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vectors = model.embed(["cat"], input_type="query")
    np.testing.assert_allclose(vectors, expected(["query: cat"]), rtol=1e-6)


def test_vectors_that_are_cut_of_a_model_that_does_not_say_that_they_may_be_are_warned_of(
    open_model: OpenModel, tmp_path: Path
) -> None:
    model = open_model(FakeEngine(LIMITS))
    with pytest.warns(UserWarning, match=r"tiny does not say that its vectors may be cut \(Matryoshka\)") as caught:
        model.embed(["cat"], dimensions=3)
    assert [warning.filename for warning in caught] == [__file__]
    model.embed(["cat"], dimensions=8)  # nothing is cut
    trained = save_artifact(tmp_path / "trained", embedding={"matryoshka_dimensions": [3]}).path
    open_model(FakeEngine(LIMITS), trained).embed(["cat"], dimensions=3)
    refusing = open_model(FakeEngine(LIMITS), untrained_dimensions="refuse")
    with pytest.raises(InvalidRequestError, match="untrained_dimensions is refuse: leave dimensions out"):
        refusing.embed(["cat"], dimensions=3)


def test_settings_are_those_of_the_server_that_are_not_about_a_network(
    artifact: Artifact, open_model: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no setting 'port'\. Known settings: auto_truncate"):
        Model(artifact.path, port=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'engine_threads'"):
        Model(artifact.path, engine_thread=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="tune must be one of"):
        Model(artifact.path, tune="never")
    monkeypatch.setenv("BEI_AUTO_TRUNCATE", "false")
    with pytest.raises(InputTooLongError):
        open_model(FakeEngine(LIMITS)).embed(["cat " * 40])
    assert open_model(FakeEngine(LIMITS), auto_truncate=True, cache_dir=tmp_path).embed(["cat " * 40]).any()


def test_costs_are_measured_once_and_kept(open_model: OpenModel, tmp_path: Path) -> None:
    engine = FakeEngine(LIMITS)
    open_model(engine, tune="auto", cache_dir=str(tmp_path)).close()
    assert len(list((tmp_path / "costs").iterdir())) == 1
    again = FakeEngine(LIMITS)
    open_model(again, tune="auto", cache_dir=str(tmp_path))
    assert len(again.batches) == 1 < len(engine.batches)  # the canary


def test_an_artifact_is_verified_and_its_model_described(open_model: OpenModel, tmp_path: Path) -> None:
    artifact = save_artifact(tmp_path / "second", name="org/second")
    model = open_model(FakeEngine(LIMITS), artifact.path)
    assert model.name == "org/second"
    assert model.manifest.dimension("embedding") == 8
    assert model.certificate.passed
    (artifact.path / "engine" / "fake.bin").write_bytes(b"another engine")
    with pytest.raises(ArtifactHashMismatchError):
        Model(artifact.path)


def test_an_engine_that_computes_something_else_is_refused(open_model: OpenModel, tmp_path: Path) -> None:
    path = save_artifact(tmp_path / "other", canary=[1, 0, 0, 0, 0, 0, 0, 0]).path
    with pytest.raises(EngineError, match="this machine gives other results"):
        open_model(FakeEngine(LIMITS), path)
    wait_until(lambda: not own_threads(), "its threads end")


def types_that_callers_see(model: Model) -> None:
    """For the type checker: never run."""
    assert_type(model.embed(["a"], output_dtype="int8", dimensions=4), npt.NDArray[Any])
    assert_type(model.embed_sparse(["a"], top_k=4), list[SparseVector])
    assert_type(model.rerank("a", ["b"], top_n=1), list[Rank])
    assert_type(model.classify([("a", "b")]), Predictions)
    assert_type(model.embed(["a"], report=Report(), progress=print), npt.NDArray[Any])
    for chunk in model.embed_all_iter(["a"], input_type="query", report=Report(), progress=True):
        assert_type(chunk, Chunk[TextOrPicture, list[Float32Array]])
    model.embed(["a"], dimension=4)  # type: ignore[call-arg]
    model.embed(["a"], dimensions="4")  # type: ignore[arg-type]
    model.embed_sparse(["a"], dimensions=4)  # type: ignore[call-arg]
    model.embed(["a"], chunk_size=4)  # type: ignore[call-arg]
    model.embed(["a"], report=True)  # type: ignore[arg-type]
    model.embed_iter(aiter_of())  # type: ignore[arg-type]


def test_texts_that_are_tokenized_count_with_all_of_their_length(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few such texts are in flight at once, and none is interactive."""
    monkeypatch.setattr(flow, "_MOST_TOKENS", 16 * 1000)
    tickets: list[Any] = []
    service = model._runner.service
    accept = service.accept

    def noted(*inputs: Any, **asked: Any) -> Any:
        tickets.append(accept(*inputs, **asked))
        return tickets[-1]

    monkeypatch.setattr(service, "accept", noted)
    long = "cat " * 2000
    assert [len(tokens) for tokens in model.tokenize([long] * 3)] == [2002] * 3
    assert [(ticket.num_inputs, ticket.lane) for ticket in tickets] == [(1, "bulk")] * 3
