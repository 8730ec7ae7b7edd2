"""``bei cache list`` and ``bei cache prune`` in process; beside a running server: tests/e2e/test_commands.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from bei.artifact.cache import ModelCache
from bei.artifact.cost_cache import CostCache
from bei.cli import main
from tests.bei.cli.test_main import fails_with

DAY = 86400.0
OLD, NEW = "old-cpu-bf16-0123456789ab", "new-cpu-bf16-ba9876543210"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    """Two artifacts and two measurements, where the commands look for them."""
    cache = ModelCache(tmp_path / "cache")
    monkeypatch.setenv("BEI_CACHE_DIR", str(cache.folder))
    for name, size, age_s in ((OLD, 3_000_000, 40 * DAY), (NEW, 1_000_000, 0.0)):
        with cache.use(name) as use:
            use.path.mkdir()
            (use.path / "model.bin").write_bytes(bytes(size))
        os.utime(cache.folder / f".{name}.used", (time.time() - age_s,) * 2)
    for key in (1, 2):
        CostCache(cache.folder).write("tiny", {"key": key}, "data")
    return cache


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main.main(["cache", *arguments])
    return capsys.readouterr().out.splitlines()


def test_the_list_shows_what_there_is(capsys: pytest.CaptureFixture[str], cache: ModelCache) -> None:
    with cache.use(OLD):
        lines = said_by(capsys, "list")
        assert lines[0] == f"{cache.folder}: 4.0 MB, cache_max_size 50.0 GB"
        rows = [line.split() for line in lines]
        assert [OLD, "3.0", "MB", "now", "in", "use"] in rows
        assert [NEW, "1.0", "MB", "now"] in rows
        assert any(line.strip().startswith("costs/ (measurements: 2)") for line in lines)
        assert all(line == line.rstrip() for line in lines)


def test_the_list_is_there_for_programs(capsys: pytest.CaptureFixture[str], cache: ModelCache) -> None:
    found = json.loads("\n".join(said_by(capsys, "list", "--json")))
    assert (found["cache_dir"], found["max_size_bytes"]) == (str(cache.folder), 50 * 10**9)
    assert [(entry["kind"], entry["in_use"]) for entry in found["entries"]].count(("costs", False)) == 2
    assert sum(entry["size_bytes"] for entry in found["entries"]) == found["size_bytes"]
    old = found["entries"][-1]
    assert (old["kind"], old["name"], old["path"]) == ("artifact", OLD, str(cache.folder / OLD))
    assert (old["size_bytes"], old["in_use"]) == (3_000_000, False)
    assert old["last_used"].endswith("+00:00")


def test_an_empty_cache_is_no_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("list", "prune"):
        assert said_by(capsys, command, "--cache-dir", str(tmp_path / "absent"))
    assert json.loads("\n".join(said_by(capsys, "list", "--json", "--cache-dir", str(tmp_path))))["entries"] == []


def test_pruning_keeps_the_bound_that_starts_keep(
    capsys: pytest.CaptureFixture[str], cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said_by(capsys, "prune")[-1].startswith("0 B freed, 4.0 MB left")
    monkeypatch.setenv("BEI_CACHE_MAX_SIZE", "2MB")
    removed, total = said_by(capsys, "prune", "--dry-run")
    assert removed == f"would remove {cache.folder / OLD}, 3.0 MB"
    assert total == "3.0 MB to free, 1.0 MB would be left"
    assert (cache.folder / OLD).is_dir()
    removed, total = said_by(capsys, "prune")
    assert removed == f"removed {cache.folder / OLD}, 3.0 MB"
    assert total == "3.0 MB freed, 1.0 MB left"
    assert not (cache.folder / OLD).exists()


def test_pruning_by_age_size_and_all(capsys: pytest.CaptureFixture[str], cache: ModelCache) -> None:
    assert said_by(capsys, "prune", "--older-than", "41d") == ["0 B freed, 4.0 MB left"]
    assert said_by(capsys, "prune", "--older-than", "30d", "--dry-run")[0].startswith(
        f"would remove {cache.folder / OLD}"
    )
    with cache.use(OLD):
        assert said_by(capsys, "prune", "--max-size", "0")[-1].endswith("freed, 3.0 MB left, 1 in use")
    assert said_by(capsys, "prune", "--all")[-1] == "3.0 MB freed, 0 B left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune", "--all", "--max-size", "1GB"], "--all removes everything: leave --max-size out"),
        (["prune", "--all", "--older-than", "1d"], "leave --older-than out"),
        (["prune", "--max-size", "1PB"], "--max-size must be a size such as"),
        (["prune", "--older-than", "soon"], "--older-than must be a time such as"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], cache: ModelCache, arguments: list[str], message: str
) -> None:
    assert message in fails_with(capsys, "cache", *arguments)
    assert len(cache.entries()) == 4


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["cache"])
    assert caught.value.code == 2
    assert "list | prune" in capsys.readouterr().err
