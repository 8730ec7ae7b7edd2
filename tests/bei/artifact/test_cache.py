"""The cache's entries and their removal: never one that is in use, being built, or foreign."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.cache import CacheEntry, ModelCache, _chosen
from bei.artifact.cost_cache import CostCache
from bei.errors import ConfigError
from bei.utils.file_lock import acquire
from tests.support.engines import DEADLINE_S

HOUR = 3600.0


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def named(name: str) -> str:
    """As bei_build.cache calls it."""
    return f"{name}-cpu-bf16-0123456789ab"


def put(cache: ModelCache, name: str, size: int = 1000, age_s: float = 0.0) -> Path:
    """An entry that was built, and last used ``age_s`` ago."""
    with cache.use(named(name)) as use, cache.building(named(name)):
        (use.path / "engine").mkdir(parents=True)
        (use.path / "engine" / "model.bin").write_bytes(bytes(size))
    then_s = time.time() - age_s
    os.utime(cache.folder / f".{named(name)}.used", (then_s, then_s))
    return use.path


def names(entries: list[CacheEntry]) -> list[str]:
    return [entry.name.split("-cpu-")[0] for entry in entries]


def left(cache: ModelCache) -> set[str]:
    """All that is in the folder, but for the lock of the whole."""
    return set(os.listdir(cache.folder)) - {".bei.lock"}


# Entries.


def test_entries_have_their_size_and_their_last_use_and_say_who_is_in_use(cache: ModelCache) -> None:
    put(cache, "old", 3000, 2 * HOUR)
    path = put(cache, "new", 1000)
    assert names(cache.entries()) == ["new", "old"]
    new, old = cache.entries()
    assert (new.path, new.kind, new.size_bytes, old.size_bytes) == (path, "artifact", 1000, 3000)
    assert old.last_used_s == pytest.approx(time.time() - 2 * HOUR, abs=60)
    with cache.use(named("old")), cache.use(named("old")):
        assert [(entry.name, entry.in_use) for entry in cache.entries()] == [
            (named("old"), True),
            (named("new"), False),
        ]
    assert not any(entry.in_use for entry in cache.entries())


def test_an_entry_was_used_until_its_use_ended(cache: ModelCache) -> None:
    """A server that ran for a month has used it today."""
    use = cache.use(named("a"))
    os.utime(cache.folder / f".{named('a')}.used", (1, 1))
    use.path.mkdir()
    use.close()
    assert cache.entries()[0].last_used_s > 1


def test_measurements_are_entries_that_reading_keeps_young(cache: ModelCache) -> None:
    costs = CostCache(cache.folder)
    path = costs.write("tiny", {"key": 1}, [1, 2, 3])
    assert path is not None
    os.utime(path, (1, 1))
    (entry,) = cache.entries()
    assert (entry.kind, entry.path, entry.last_used_s, entry.in_use) == ("costs", path, 1, False)
    assert costs.read("tiny", {"key": 1}) == [1, 2, 3]
    assert cache.entries()[0].last_used_s > 1
    assert [entry.path for entry in cache.prune(everything=True)] == [path]
    assert costs.read("tiny", {"key": 1}) is None


def test_a_folder_that_is_not_there_is_empty(cache: ModelCache) -> None:
    assert cache.entries() == []
    assert cache.prune(everything=True) == []
    assert not cache.folder.exists()


def test_a_folder_that_cannot_be_made_says_which_setting_names_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .*: name another folder with --cache-dir"):
        ModelCache(tmp_path / "file" / "cache").use(named("a"))
    with pytest.raises(ConfigError, match=r"/file is a file, not a folder: name another folder with --cache-dir"):
        ModelCache(tmp_path / "file").use(named("a"))


# Removal.


def test_the_least_recently_used_goes_first_until_the_rest_fits(cache: ModelCache) -> None:
    for name, size, hours in (("a", 1000, 3), ("b", 1000, 1), ("c", 1000, 2), ("d", 1000, 4)):
        put(cache, name, size, hours * HOUR)
    assert cache.prune(max_bytes=4000) == []
    assert names(cache.prune(max_bytes=2500, dry_run=True)) == ["d", "a"]
    assert names(cache.entries()) == ["b", "c", "a", "d"]
    assert names(cache.prune(max_bytes=2500)) == ["d", "a"]
    assert names(cache.entries()) == ["b", "c"]
    assert left(cache) == {
        f"{dot}{named(name)}{end}" for name in "bc" for dot, end in (("", ""), (".", ".used"), (".", ".lock"))
    }


def test_what_was_not_used_for_long_goes_however_much_room_there_is(cache: ModelCache) -> None:
    put(cache, "old", 10, 31 * 24 * HOUR)
    put(cache, "new", 10, 29 * 24 * HOUR)
    assert names(cache.prune(older_than_s=30 * 24 * HOUR)) == ["old"]
    assert names(cache.entries()) == ["new"]


def test_everything_goes_but_what_is_in_use(cache: ModelCache) -> None:
    for name in "abc":
        put(cache, name)
    with cache.use(named("b")):
        assert sorted(names(cache.prune(everything=True))) == ["a", "c"]
        assert cache.prune(max_bytes=0) == []
    assert names(cache.prune(everything=True)) == ["b"]
    assert left(cache) == set()


def test_other_people_s_files_stay(cache: ModelCache, tmp_path: Path) -> None:
    put(cache, "ours")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (cache.folder / named("linked")).symlink_to(elsewhere)
    (cache.folder / f".{named('linked')}.used").touch()
    (cache.folder / f".{named('linked')}.abcdefgh").symlink_to(elsewhere)
    for name in (
        "real-models/model",
        f"{named('mine')}/engine",
        ".git/objects",
        "costs/notes.json",
        f".{named('x')}.abcdefgh/y",
    ):
        (cache.folder / name).mkdir(parents=True)
    (cache.folder / "costs" / "todo.txt").touch()
    before = left(cache) - {named("ours"), f".{named('ours')}.used", f".{named('ours')}.lock"}
    assert names(cache.prune(everything=True, max_bytes=0)) == ["ours"]
    assert left(cache) == before
    assert (elsewhere / "file").exists()


@given(
    entries=st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.sampled_from(["artifact", "costs", "leftover"]))),
    bound=st.integers(0, 400),
)
def test_no_more_is_removed_than_the_bound_asks_for(entries: list[tuple[int, bool, str]], bound: int) -> None:
    """Entries come the last used first. Leftovers go in any case."""
    given_entries = [
        CacheEntry(kind, Path(str(index)), size, -float(index), in_use)  # type: ignore[arg-type]
        for index, (size, in_use, kind) in enumerate(entries)
    ]
    chosen = _chosen(given_entries, bound, None)
    assert not any(entry.in_use for entry in chosen)
    kept = [entry for entry in given_entries if entry not in chosen]
    assert all(entry.in_use for entry in kept if entry.kind == "leftover")
    size = sum(entry.size_bytes for entry in kept)
    free = [entry for entry in kept if not entry.in_use]
    assert size <= bound or not free
    of_bound = [entry for entry in chosen if entry.kind != "leftover"]
    assert all(entry.last_used_s >= gone.last_used_s for entry in free for gone in of_bound)
    if of_bound:
        last = max(of_bound, key=lambda entry: entry.last_used_s)
        assert size + last.size_bytes > bound, "it could have stayed"


# Half an artifact.


def test_what_a_killed_build_has_left_is_removed_by_the_next_one_and_by_prune(
    cache: ModelCache, tmp_path: Path
) -> None:
    """A process that builds is killed; its locks go with it, its scratch folder stays."""
    code = f"""
import sys, tempfile, time
from pathlib import Path
from bei.artifact.cache import ModelCache
cache = ModelCache(Path({str(cache.folder)!r}))
with cache.use({named("a")!r}), cache.building({named("a")!r}):
    scratch = Path(tempfile.mkdtemp(prefix={"." + named("a") + "."!r}, dir=cache.folder))
    (scratch / "half").write_bytes(bytes(500))
    (scratch.with_name(scratch.name + ".replaced")).mkdir()
    print("building", flush=True)
    time.sleep({DEADLINE_S})
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        found = cache.entries()
        assert [(entry.kind, entry.in_use) for entry in found] == [("leftover", True)] * 2
        assert cache.prune(everything=True) == []
        process.send_signal(signal.SIGKILL)
    found = cache.entries()
    assert [(entry.kind, entry.in_use) for entry in found] == [("leftover", False)] * 2
    assert sum(entry.size_bytes for entry in found) >= 500
    half = tempfile.mkdtemp(prefix=f".{named('b')}.", dir=cache.folder)
    with cache.use(named("b")), cache.building(named("b")):
        assert not Path(half).exists()
    assert sorted(entry.path for entry in cache.prune(max_bytes=10**9)) == sorted(entry.path for entry in found)
    assert left(cache) == set(), "locks of entries that are nowhere go too"


def test_half_a_measurement_is_left_alone_for_an_hour(cache: ModelCache) -> None:
    file = cache.folder / "costs" / "tmpabc_123.partial"
    file.parent.mkdir(parents=True)
    file.touch()
    assert cache.prune(everything=True) == []
    os.utime(file, (time.time() - 2 * HOUR,) * 2)
    assert [entry.path for entry in cache.prune()] == [file]


# Several at once.


def test_one_builds_and_the_others_find_it_built(cache: ModelCache) -> None:
    built: list[int] = []

    def start(number: int) -> None:
        with cache.use(named("a")) as use:
            if not use.path.exists():
                with cache.building(named("a")):
                    if not use.path.exists():
                        time.sleep(0.05)
                        use.path.mkdir()
                        built.append(number)
            assert use.path.is_dir()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(built) == 1


def test_whoever_uses_an_entry_has_it_however_often_others_prune(cache: ModelCache) -> None:
    """Locks belong to open files, so threads can stand for processes."""
    is_over = threading.Event()
    faults: list[BaseException] = []
    # Lists, not numbers: two threads that add to one number at a time lose what one of them has added.
    uses: list[Path] = []
    removed: list[CacheEntry] = []

    def use() -> None:
        while not is_over.is_set():
            with cache.use(named("a")) as used:
                with cache.building(named("a")):
                    if not used.path.exists():
                        used.path.mkdir()
                        (used.path / "file").touch()
                assert (used.path / "file").exists()
                uses.append(used.path)
            time.sleep(0.002)  # else one of the two would use it at every moment

    def prune() -> None:
        while not is_over.is_set():
            removed.extend(cache.prune(everything=True))
            cache.entries()
            if len(removed) >= 10:
                is_over.set()

    def noted(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            faults.append(error)
            is_over.set()

    threads = [threading.Thread(target=noted, args=(work,)) for work in (use, use, prune, prune)]
    for thread in threads:
        thread.start()
    is_over.wait(DEADLINE_S)
    is_over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert faults == []
    assert len(removed) >= 10
    assert len(uses) >= len(removed)


# The bound at a start.


def test_a_start_keeps_the_bound_and_says_what_it_has_removed(
    cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(cache, "old", 3000, HOUR)
    put(cache, "new", 2000)
    cache.enforce_limit(None)
    cache.enforce_limit(5000)
    assert caplog.text == ""
    cache.enforce_limit(2500)
    assert names(cache.entries()) == ["new"]
    assert f"removed {cache.folder / named('old')} (3.0 kB) from the cache" in caplog.text
    caplog.clear()
    with cache.use(named("new")):
        cache.enforce_limit(1)
    assert "holds 2.0 kB, more than cache_max_size (1 B), and all of it is in use" in caplog.text


def test_a_bound_that_cannot_be_kept_stops_no_start(
    cache: ModelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, "a", 10)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("bei.artifact.cache.shutil.rmtree", refused)
    cache.enforce_limit(1)
    assert "cannot be kept below cache_max_size" in caplog.text


def test_a_listing_needs_no_write_permission(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, "a")

    def refused(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("bei.artifact.cache.acquire", refused)
    assert names(cache.entries()) == ["a"]
    with pytest.raises(PermissionError):
        cache.prune()


def test_an_entry_whose_lock_another_has_is_in_use(cache: ModelCache) -> None:
    put(cache, "a")
    with acquire(cache.folder / f".{named('a')}.used", shared=True):
        assert cache.entries()[0].in_use
