"""Wherever a process ends, every line of the input has one answer in the end: a machine that ends at any moment."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bei.server.batches import answer_files
from bei.server.batches.answer_files import AnswerFiles, Checkpoint, LineResult, answered, unanswered
from bei.server.batches.in_process import LineAnswer
from bei.server.batches.lines import LineProblem, RequestLine


def result_of(number: int, status: int) -> LineResult:
    line = RequestLine(number, number * 10, f"c{number}", "/embed")
    if status == 0:
        return unanswered(line, LineProblem("batch_expired", "too late"))
    return answered(line, LineAnswer(status, f"r{number}", b'{"some":"body"}'))


class Crashes(RuleBasedStateMachine):
    """Lines are answered in order; now and then the process ends, and leaves any part of what was not committed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.kept = Checkpoint()
        self.files = self.opened()

    def opened(self) -> AnswerFiles:
        def save(checkpoint: Checkpoint) -> None:
            self.kept = checkpoint

        return AnswerFiles(self.folder / "output", self.folder / "errors", self.kept, save)

    @rule(statuses=st.lists(st.sampled_from([200, 200, 400, 500, 0]), max_size=4))
    def answer(self, statuses: list[int]) -> None:
        first = self.files.reached.num_lines + 1
        self.files.append([result_of(number, status) for number, status in enumerate(statuses, first)])

    @rule()
    def commit(self) -> None:
        self.files.commit()
        assert self.kept == self.files.reached

    @rule(lost=st.integers(0, 400), of=st.sampled_from(["output", "errors"]))
    def crash(self, lost: int, of: str) -> None:
        """What was not on the disk may be there, in part, or gone."""
        self.files.__exit__()
        path, least = self.folder / of, self.kept.output_bytes if of == "output" else self.kept.error_bytes
        with path.open("r+b") as file:
            file.truncate(max(least, path.stat().st_size - lost))
        self.files = self.opened()

    @invariant()
    def every_line_so_far_has_one_answer(self) -> None:
        reached = self.files.reached
        output, errors = ((self.folder / name).read_bytes().splitlines() for name in ("output", "errors"))
        found = [json.loads(line)["custom_id"] for line in (*output, *errors)]
        assert sorted(found) == sorted(f"c{number}" for number in range(1, reached.num_lines + 1))
        assert (len(output), len(errors)) == (reached.completed, reached.failed)
        assert reached.input_bytes == reached.num_lines * 10

    def teardown(self) -> None:
        self.files.__exit__()
        shutil.rmtree(self.folder)


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=30, stateful_step_count=12)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "output", tmp_path / "errors"


def test_answers_and_errors_have_openai_s_form(paths: tuple[Path, Path]) -> None:
    with AnswerFiles(*paths, Checkpoint(), lambda _: None) as files:
        files.append([result_of(1, 200), result_of(2, 404), result_of(3, 0)])
    (good,), bad = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    assert good.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r1", "body": {"some": "body"}}
    assert good == {"custom_id": "c1", "response": response, "error": None}
    assert (bad[0]["response"]["status_code"], bad[0]["error"]) == (404, None)
    assert (bad[1]["response"], bad[1]["error"]) == (None, {"code": "batch_expired", "message": "too late"})
    assert len({one["id"] for one in bad}) == 2


def test_a_checkpoint_is_kept_now_and_then_by_itself(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Checkpoint] = []
    with AnswerFiles(*paths, Checkpoint(), kept.append) as files:
        files.append([result_of(1, 200)])
        assert kept == []
        monkeypatch.setattr(answer_files, "_CHECKPOINT_S", 0.0)
        files.append([result_of(2, 200)])
        files.commit()
    assert [one.num_lines for one in kept] == [2]


def test_a_file_that_lost_what_was_committed_is_refused(paths: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        AnswerFiles(*paths, Checkpoint(output_bytes=10), lambda _: None)
