"""How ``bei embed`` ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bei.artifact.manifest import Manifest
from bei.cli import main
from bei.engine.fake import FakeEngine
from tests.support.artifacts import save_artifact

Embed = Callable[..., int]


@pytest.fixture
def embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embed:
    """``embed(content, *flags)``: the command over a file of this content. Returns the exit code."""
    artifact = save_artifact(tmp_path / "model")

    def load(_: Path, manifest: Manifest, *__: object) -> FakeEngine:
        return FakeEngine(manifest.limits)

    monkeypatch.setattr("bei.service.loader.load_engine", load)

    def embed(content: str, *flags: str, name: str = "rows.jsonl") -> int:
        (tmp_path / name).write_text(content)
        given = ("--input", str(tmp_path / name), "--output", str(tmp_path / "out"), "--tokenizer-threads", "1")
        try:
            main.main(["embed", str(artifact.path), *given, *flags])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return embed


def test_some_rows_without_an_answer_are_a_success(embed: Embed, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed('{"text": "a"}\n{"text": ""}\n') == 0
    assert "Rows without an answer: 1;" in capsys.readouterr().err


@pytest.mark.parametrize("on_error", ["skip", "null"])
def test_a_job_in_which_no_row_has_an_answer_is_none(
    on_error: str, embed: Embed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second time all is done
        assert embed('{"text": null}\n{"text": ""}\n', "--on-error", on_error) == 1
        assert f"error: No row has an answer: {tmp_path / 'out'}/_dead says why." in capsys.readouterr().err


def test_a_part_may_have_rows_without_an_answer_alone(embed: Embed) -> None:
    """A job of Kubernetes would try it again and again."""
    content = '{"text": ""}\n{"text": "a"}\n'
    assert [embed(content, "--shard-rows", "1", "--shard", f"{part}/2") for part in (0, 1)] == [0, 0]


def test_plain_text_is_refused_where_json_is_expected(
    embed: Embed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its lines were dead rows of a job that had succeeded."""
    assert embed("a text\nother\n") == 2
    assert "None of the first 2 lines, from" in (said := capsys.readouterr().err)
    assert "is this plain text? Give --input-format text." in said
    assert not (tmp_path / "out").exists()
    assert embed("a text\nother\n", "--input-format", "text") == 0
