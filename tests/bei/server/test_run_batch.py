"""``bei run-batch`` over a fake engine: what is written, what is refused before a model is loaded, and going on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.manifest import Artifact, Manifest
from bei.cli import main
from bei.cli.run_batch import SETTINGS
from bei.engine.fake import FakeEngine
from bei.server.batches import answer_files
from bei.server.run_batch import ANSWERING
from tests.support.artifacts import save_artifact

Run = Callable[..., int]


def line(custom_id: str, body: object = None, url: str = "/v1/embeddings", **fields: object) -> dict[str, object]:
    body = {"input": f"hello {custom_id}"} if body is None else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were loaded."""
    found: list[str] = []

    def load(folder: Path, manifest: Manifest, *_: Any) -> FakeEngine:
        found.append(manifest.name)
        return FakeEngine(manifest.limits)

    monkeypatch.setattr("bei.service.loader.load_engine", load)
    return found


@pytest.fixture
def run(artifact: Artifact, loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in ``tmp_path``, over ``in.jsonl`` into ``out.jsonl``. Returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(
        *flags: str, source: str = "in.jsonl", output: str = "out.jsonl", models: Sequence[Path] = (artifact.path,)
    ) -> int:
        files = ("-i", source, "-o", output, "--tune", "off", "--tokenizer-threads", "1")
        try:
            main.main(["run-batch", *files, *flags, *map(str, models)])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


def test_every_line_is_answered_by_its_route_and_errors_are_apart(run: Run, tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl",
        *(line("a"), line("b", {"inputs": "x"}, "/tei/embed"), line("c", {"input": ""}), "garbage", ""),
        *(line("d", {}, "/v1/nothing"), line("e", method="PUT"), line("f")),
    )
    assert run() == 1
    good, bad = read(tmp_path / "out.jsonl"), read(tmp_path / "out.errors.jsonl")
    assert [one["custom_id"] for one in good] == ["a", "b", "f"]
    assert len(good[0]["response"]["body"]["data"]) == len(good[1]["response"]["body"]) == 1
    assert [one["custom_id"] for one in bad] == ["c", None, "d", "e"]
    assert [one["response"] and one["response"]["status_code"] for one in bad] == [400, None, 404, None]
    assert bad[0]["response"]["body"]["error"]["param"] == "input"
    assert [one["error"] and (one["error"]["code"], one["error"]["line"]) for one in bad] == [
        None,
        ("invalid_json_line", 4),
        None,
        ("invalid_method", 7),
    ]


def test_a_text_that_was_cut_within_a_character_costs_its_own_line_the_answer(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", {"input": "cut \ud83d"}), line("c"))
    assert run() == 1
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == ["a", "c"]
    (bad,) = read(tmp_path / "out.errors.jsonl")
    assert (bad["custom_id"], bad["response"]["body"]["error"]["code"]) == ("b", "invalid_text")


def test_without_errors_there_is_no_file_of_them_and_the_code_is_0(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    assert run("--errors", "bad.jsonl") == 0
    assert sorted(path.name for path in tmp_path.glob("*jsonl*")) == ["in.jsonl", "out.jsonl", "out.jsonl.progress"]
    assert not [*tmp_path.glob(".*")]


def test_a_second_run_does_nothing_and_further_lines_are_added(run: Run, loaded: list[str], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), "garbage")
    assert run() == 1
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run() == 1
    assert len(loaded) == 1
    write(tmp_path / "in.jsonl", line("a"), "garbage", line("b"))
    assert run() == 1
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == ["a", "b"]
    assert len(read(tmp_path / "out.errors.jsonl")) == 1


def test_what_an_ended_run_has_left_behind_its_checkpoint_is_computed_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "_CHECKPOINT_S", 0.0)
    write(tmp_path / "in.jsonl", *(line(f"c{number}") for number in range(50)))
    assert run() == 0
    progress = json.loads((tmp_path / "out.jsonl.progress").read_text())
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    progress["checkpoint"] |= {"num_lines": 20, "completed": 20, "output_bytes": len(b"".join(lines[:20]))}
    content = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    progress["checkpoint"]["input_bytes"] = len(b"".join(content[:20]))
    (tmp_path / "out.jsonl.progress").write_text(json.dumps(progress))
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:30]) + lines[30][:40])
    assert run() == 0
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == [f"c{number}" for number in range(50)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: write(folder / "in.jsonl", line("x"), line("b")), "another input"),
        (lambda folder: write(folder / "in.jsonl", line("a")), "another input"),
        (lambda folder: (folder / "out.jsonl.progress").unlink(), "no out.jsonl.progress"),
        (lambda folder: (folder / "out.jsonl.progress").write_text("{}"), "not what a run has left"),
        (lambda folder: (folder / "out.jsonl").write_bytes(b""), "shorter"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    run: Run, tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b"))
    assert run() == 0
    change(tmp_path)
    assert run() == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert len(loaded) == 1


@pytest.fixture
def begun(run: Run, tmp_path: Path) -> Path:
    """A run that has answered the first of two lines: its progress."""
    write(tmp_path / "in.jsonl", line("a"))
    assert run("--alias", "own") == 0
    write(tmp_path / "in.jsonl", line("a"), line("b"))
    return tmp_path / "out.jsonl.progress"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--no-auto-truncate",), "--auto-truncate was True, now False"),
        (("--dialect", "tei"), "--dialect was bei, now tei"),
        (("--alias", "other"), "--alias was own, now own,other"),
    ],
)
def test_other_settings_do_not_go_on(
    flags: tuple[str, ...], said: str, run: Run, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = begun.read_bytes()
    assert run("--alias", "own", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"given otherwise: {said}. Give the same again, or remove it with" in error
    assert json.loads(begun.read_bytes())["served"] == json.loads(before)["served"]
    assert run("--alias", "own", "--max-client-batch-size", "7") == 0


def test_other_models_do_not_go_on(
    run: Run,
    begun: Path,
    artifact: Artifact,
    second_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rebuilt = save_artifact(tmp_path / "rebuilt", embedding={"normalize": False})
    assert run("--alias", "own", models=[rebuilt.path]) == 2
    said = f"the artifact of {rebuilt.manifest.name} was {artifact.manifest.digest}, now {rebuilt.manifest.digest}"
    assert said in capsys.readouterr().err
    assert run("--alias", "own=tiny", models=[second_artifact.path, artifact.path]) == 2
    assert "the list of models was tiny, now org/second,tiny" in capsys.readouterr().err
    assert len(read(tmp_path / "out.jsonl")) == 1


def test_a_run_of_a_version_that_kept_no_record_of_the_model_is_refused_with_what_to_do(
    run: Run, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = json.loads(begun.read_bytes())
    del progress["served"]
    begun.write_text(json.dumps(progress))
    assert run("--alias", "own") == 2
    assert "end the run with that version, or remove it with" in capsys.readouterr().err
    write(tmp_path / "in.jsonl", line("a"))  # all of it is answered
    begun.write_text(json.dumps(progress))
    assert run("--alias", "own") == 0


def test_every_setting_is_one_that_answers_depend_on_or_one_that_they_do_not() -> None:
    of_models = {"models", "precision"}
    of_speed = {
        *("engine_threads", "engine_streams", "graph_megabytes", "gpu_megabytes", "devices", "tune"),
        *("tokenizer_threads", "hang_timeout", "cache_dir", "cache_max_size", "max_queue_tokens", "answer_memory"),
    }
    refusing = {"require_signature", "max_client_batch_size", "payload_limit", "answer_limit"}
    assert of_models | of_speed | refusing | {*ANSWERING} == SETTINGS


def test_an_id_that_is_there_twice_is_refused_by_name(
    run: Run, tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", line("same"), line("b"), line("same"))
    assert run() == 2
    assert "'same' in lines 1 and 3" in capsys.readouterr().err
    assert loaded == []
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "nothing.jsonl"}, "No such file"),
        ({"source": "/dev/stdin"}, "no regular file"),
        ({"output": "in.jsonl"}, "three files"),
        ({"output": "/dev/null"}, "no regular file"),
        ({"output": "nothing/out.jsonl"}, "No such file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str], given: dict[str, str], said: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    assert run(**given) == 2
    assert said in capsys.readouterr().err
    assert loaded == []


def test_settings_of_http_mean_nothing_and_several_processes_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    monkeypatch.setenv("BEI_API_KEYS", "0123456789abcdef")
    monkeypatch.setenv("BEI_METRICS_NEED_KEY", "true")
    assert run() == 0
    assert run("--devices", "0,1") == 2
    assert "one process and one device" in capsys.readouterr().err
    assert run("--port", "8000") == 2
    assert "--port is a flag of 'bei serve'" in capsys.readouterr().err
