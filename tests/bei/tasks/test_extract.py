"""How many labels a text may be scored for, how many spans it may have, and where they are chosen."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bei.artifact.label_layouts import Extraction
from bei.errors import BeiError, InvalidRequestError
from bei.service.service import InferenceService
from bei.tasks import extract as extraction
from bei.tasks import span_choice, support
from bei.tasks.extract import ExtractTask, Spans
from bei.tasks.extract_labels import MOST_LABELS, CheckedLabels, extraction_of, most_vectors
from bei.tasks.schema_forms import AskedSchema
from tests.bei.server.kinds import save_kind
from tests.bei.tasks.test_embed import answer_of

TEXTS = ["the cat", "hello world the cat hello world the cat hello world", "hello"]


def extracted(path: Path, failed: dict[int, BeiError] | None = None, **fields: Any) -> Spans:
    artifact, engine = save_kind(path / "spans", "spans")

    task = ExtractTask(TEXTS, failed=failed, labels=CheckedLabels(("cat",), (0.0,)), **fields)

    async def run(service: InferenceService) -> Spans:
        with service.admit(TEXTS) as ticket:
            return await extraction.extract(service, task, ticket=ticket)

    found: Spans = answer_of(artifact, engine, run)
    return found


@pytest.mark.parametrize(
    ("width", "by_word", "most"), [(8, False, 256), (12, False, 256), (64, False, 48), (384, True, 64)]
)
def test_wide_spans_leave_room_for_fewer_labels(width: int, by_word: bool, most: int) -> None:
    layout = Extraction(
        label_id=-1, separator_id=-1, reads_marker=False, max_width=width, max_words=384, by_word=by_word, label_width=8
    )
    assert most_vectors(layout) == most
    if not by_word:
        assert most * width <= MOST_LABELS * 12


@pytest.mark.parametrize("label_width", [8, msgspec.UNSET], ids=["vectors", "in front"])
def test_labels_that_are_vectors_leave_a_window_all_its_room(label_width: int | msgspec.UnsetType) -> None:
    """A book with many of them was estimated at forty times its tokens, and refused."""
    ids = -1 if label_width else 5
    layout = Extraction(
        label_id=ids, separator_id=ids, reads_marker=False, max_width=12, max_words=384, label_width=label_width
    )
    manifest = SimpleNamespace(tasks=["extract"], extraction=layout, max_seq_len=512)
    service: Any = SimpleNamespace(name="spans", manifest=manifest, adapter=1)
    names = tuple(f"label {place:03}" for place in range(190))  # 1,710 characters
    labels = CheckedLabels(names, (0.5,) * len(names))
    around = extraction.num_around(service, labels, AskedSchema())
    pieces = extraction.inputs_of(service, ["a " * 100_000], around)
    assert (around, len(pieces[0])) == ((0, 1920) if label_width else (1710, 512 * 4 - 1710))
    assert sum(map(len, pieces)) == pytest.approx(200_000 * 4 / 3, rel=0.02)  # they overlap by a quarter


@pytest.mark.parametrize("is_large", [False, True])
def test_spans_of_large_answers_are_chosen_off_the_event_loop(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores were read on the loop, whatever their number."""
    threads = set()
    collect, choose = span_choice.collect, span_choice.choose

    def collected(*args: Any) -> None:
        threads.add(threading.current_thread())
        collect(*args)

    def chosen(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return choose(*args, **options)

    expected = extracted(tmp_path)
    monkeypatch.setattr(extraction, "collect", collected)
    monkeypatch.setattr(extraction, "choose", chosen)
    monkeypatch.setattr(support, "_MANY_NUMBERS", 0 if is_large else 1_000_000)
    assert extracted(tmp_path / "again").spans == expected.spans
    assert (threading.main_thread() in threads) is not is_large


def test_scores_are_estimated_with_the_tokens_of_short_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 labels of one character have 512 tokens in front of each window, and were estimated at 64."""
    artifact, engine = save_kind(tmp_path / "spans", "spans")
    labels = CheckedLabels(tuple("abcde"), (0.9,) * 5)
    task = ExtractTask(["cat"] * 4, labels=labels)
    num_inputs: list[int] = []
    infer = InferenceService.infer

    async def noted(self: InferenceService, request: Any, **asked: Any) -> Any:
        num_inputs.append(len(request.inputs))
        return await infer(self, request, **asked)

    async def run(service: InferenceService) -> None:
        columns = 5 * extraction_of(service).columns
        monkeypatch.setattr(extraction, "MOST_SCORES", 2 * 12 * columns)  # two texts, with ten tokens of labels each
        with service.admit(["cat"]) as ticket:
            await extraction.extract(service, task, ticket=ticket)

    monkeypatch.setattr(InferenceService, "infer", noted)
    answer_of(artifact, engine, run)
    assert num_inputs == [2, 2]


@pytest.mark.parametrize("most", [1, 24, 60])
def test_windows_are_read_so_many_at_once_that_their_scores_fit_into_memory(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all windows of a request waited for each other: of a book gigabytes."""
    expected = extracted(tmp_path)
    num_inputs: list[int] = []
    infer = InferenceService.infer

    async def noted(self: InferenceService, request: Any, **asked: Any) -> Any:
        num_inputs.append(len(request.inputs))
        return await infer(self, request, **asked)

    monkeypatch.setattr(InferenceService, "infer", noted)
    monkeypatch.setattr(extraction, "MOST_SCORES", most)
    found = extracted(tmp_path / "again")
    assert (found.spans, found.lengths) == (expected.spans, expected.lengths)
    assert max(num_inputs) == {1: 1, 24: 2, 60: 4}[most]


def test_a_text_with_too_many_candidates_fails_the_request_or_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = extracted(tmp_path)
    monkeypatch.setattr(span_choice, "MOST_CANDIDATES", 5)
    with pytest.raises(InvalidRequestError, match="More than 5 spans of a text") as caught:
        extracted(tmp_path / "whole")
    assert caught.value.param == "threshold"
    partial = extracted(tmp_path / "partial", failed={})
    assert list(partial.errors) == [1]
    assert partial.spans == [whole.spans[0], [], whole.spans[2]]


def test_so_do_the_candidates_of_all_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MOST_OF_REQUEST", 5)
    with pytest.raises(InvalidRequestError, match="More than 5 spans of the request"):
        extracted(tmp_path)
    assert extracted(tmp_path / "partial", failed={}).errors == {}
