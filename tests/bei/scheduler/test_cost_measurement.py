"""Measuring an engine whose time is a known function, what is kept of it, and when it is measured again."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.core import Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError, EngineError
from bei.scheduler.cost_measurement import (
    cache_path,
    choose_streams,
    costs_for,
    costs_while_serving,
    engine_for,
    grid,
    measure,
    steps_to_measure,
    stream_candidates,
)
from bei.scheduler.cost_model import CostModel
from tests.support.artifacts import LIMITS, VOCAB_SIZE, save_artifact
from tests.support.engines import DEADLINE_S

WIDE = Limits(max_num_tokens=2048, max_batch_size=64, max_seq_len=512)


class Clock:
    """Time that passes only where a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step_seconds(num_tokens: int, batch_size: int, longest: int) -> float:
    return 1e-3 + 20e-6 * num_tokens + batch_size * longest * (1e-6 + 4e-9 * longest)


class TimedEngine(FakeEngine):
    """Takes a known time on the test's clock; the first run of each shape takes ``compile_s`` longer."""

    def __init__(self, limits: Limits, clock: Clock, *, slower: float = 1.0, compile_s: float = 0.0) -> None:
        super().__init__(limits)
        self._clock, self._slower, self._compile_s = clock, slower, compile_s
        self._seen: set[tuple[int, int, int]] = set()

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer, and let time pass."""
        shape = (batch.num_tokens, batch.batch_size, int(np.diff(batch.cu_seqlens).max()))
        self._clock.now_s += self._slower * step_seconds(*shape)
        if shape not in self._seen:
            self._seen.add(shape)
            self._clock.now_s += self._compile_s
        return super().run(batch)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "artifact")


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    return ServeConfig(cache_dir=str(tmp_path / "cache"), engine_threads=2)


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    longest = draw(st.integers(1, 2000))
    return Limits(draw(st.integers(longest, 20_000)), draw(st.integers(1, 300)), longest)


@given(all_limits())
def test_every_shape_of_the_grid_is_within_the_limits(limits: Limits) -> None:
    shapes = steps_to_measure(limits)
    assert {tuple(shape) for shape in grid(limits)} <= {tuple(shape) for shape in shapes}
    assert all(sum(shape) <= limits.max_num_tokens and len(shape) <= limits.max_batch_size for shape in shapes)
    assert all(min(shape) >= 1 and max(shape) <= limits.max_seq_len for shape in shapes)
    assert limits.max_seq_len in {max(shape) for shape in shapes}
    assert len({tuple(shape) for shape in shapes}) == len(shapes)


def test_the_grid_tells_tokens_from_slots() -> None:
    full = [shape for shape in grid(WIDE) if len(shape) > 4 and min(shape) == max(shape)]
    ragged = [shape for shape in grid(WIDE) if len(shape) > 4 and sum(shape) < 0.6 * len(shape) * max(shape)]
    assert len(full) > 10
    assert len(ragged) > 10


def test_a_measured_model_predicts_steps_that_were_not_measured() -> None:
    clock = Clock()
    model = measure(TimedEngine(WIDE, clock, compile_s=0.2), budget_s=1000.0, clock=clock)
    assert model.is_measured
    assert model.limits == WIDE
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(200):
        lengths = rng.integers(4, rng.integers(5, 512), rng.integers(1, 20))
        shape = (int(lengths.sum()), len(lengths), int(lengths.max()))
        if shape[0] <= WIDE.max_num_tokens:
            errors.append(abs(model.seconds(*shape) / step_seconds(*shape) - 1))
    assert np.median(errors) < 0.05
    assert max(errors) < 0.2


def test_measuring_stops_when_the_budget_is_spent_and_goes_on_beyond_what_was_measured() -> None:
    clock = Clock()
    engine = TimedEngine(WIDE, clock, slower=100)
    model = measure(engine, budget_s=60.0, clock=clock)
    assert clock.now_s < 60 + 3 * 100 * step_seconds(2048, 64, 512)
    assert max(batch.num_tokens for batch in engine.batches) < WIDE.max_num_tokens
    assert model.seconds(2048, 16, 128) == pytest.approx(100 * step_seconds(2048, 16, 128), rel=0.25)


def test_some_shapes_are_measured_whatever_the_budget() -> None:
    clock = Clock()
    model = measure(TimedEngine(WIDE, clock), budget_s=0.0, clock=clock)
    assert model.is_measured
    assert model.seconds(64, 1, 64) > model.seconds(8, 1, 8)


def test_progress_goes_up_to_the_end() -> None:
    clock = Clock()
    seen: list[tuple[int, int]] = []
    measure(TimedEngine(LIMITS, clock), 1000.0, lambda done, total: seen.append((done, total)), clock=clock)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_tokens_are_of_the_vocabulary_and_vary() -> None:
    clock = Clock()
    engine = TimedEngine(LIMITS, clock)
    measure(engine, 1000.0, vocab_size=7, clock=clock)
    assert {int(token) for batch in engine.batches for token in batch.input_ids} == set(range(7))


def test_all_streams_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2)

    class Meeting(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            meeting.wait(DEADLINE_S)  # broken where one stream runs alone
            return super().run(batch)

    assert measure(Meeting(LIMITS, num_streams=2)).is_measured


def test_a_failing_engine_says_so() -> None:
    class Failing(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        measure(Failing(LIMITS))
    with pytest.raises(EngineError, match="no memory"):
        measure(Failing(LIMITS, num_streams=2))


# What is kept.


def test_the_second_start_reads_what_the_first_one_measured(artifact: Artifact, config: ServeConfig) -> None:
    first = costs_for(artifact, FakeEngine(LIMITS), config)
    engine = FakeEngine(LIMITS)
    second = costs_for(artifact, engine, config)
    assert not engine.batches
    assert second.is_measured
    assert second.to_json() == first.to_json()
    assert cache_path(artifact, engine, config).is_file()
    assert list((Path(config.cache_dir) / "costs").iterdir()) == [cache_path(artifact, engine, config)]


def test_an_engine_that_takes_another_s_place_is_not_measured_beside_requests(
    artifact: Artifact, config: ServeConfig
) -> None:
    engine, former = FakeEngine(LIMITS), CostModel.assumed(WIDE)
    former.observe(64, 1, 64, 0.5)
    for tune in ("auto", "off", "force"):
        following = costs_while_serving(artifact, engine, replace(config, tune=tune), former)
        assert following.limits == LIMITS
        assert following.seconds(16, 1, 16) == former.seconds(16, 1, 16)
    measured = costs_for(artifact, FakeEngine(LIMITS), config)
    assert costs_while_serving(artifact, engine, config, former).to_json() == measured.to_json()
    assert not engine.batches


@pytest.mark.parametrize("what", ["artifact", "threads", "cores", "streams", "options", "device", "library"])
def test_another_engine_or_machine_is_measured_anew(
    what: str, artifact: Artifact, config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs_for(artifact, FakeEngine(LIMITS), config)
    engine = FakeEngine(LIMITS, num_streams=2 if what == "streams" else 1)
    if what == "artifact":
        artifact = save_artifact(tmp_path / "other", name="other weights")
    elif what == "threads":
        config = ServeConfig(cache_dir=config.cache_dir, engine_threads=3)
    elif what == "options":
        config = replace(config, graph_megabytes=0)
    elif what == "cores":
        monkeypatch.setattr("bei.scheduler.cost_measurement.usable_cores", lambda: 77)
    elif what == "device":
        engine.info = type(engine.info)(**{**vars(engine.info), "device": "another CPU"})
    elif what == "library":
        engine.info = type(engine.info)(**{**vars(engine.info), "target": "cpu"})
        costs_for(artifact, engine, config)
        engine.batches.clear()
        monkeypatch.setattr("bei.scheduler.cost_measurement.version", lambda _: "9999.0")
    assert costs_for(artifact, engine, config).is_measured
    assert engine.batches


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"\x00{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text(path.read_text()[:50]),
        lambda path: path.write_text(path.read_text().replace('"per_step"', '"per_stop"')),
        lambda path: path.write_text(path.read_text().replace('"max_seq_len": 16', '"max_seq_len": 15')),
        lambda path: path.write_text(path.read_text().replace('"cores"', '"cares"')),
        # A table of so many rows would take all memory.
        lambda path: path.write_text(path.read_text().replace('"max_batch_size": 8', f'"max_batch_size": {1 << 40}')),
        lambda path: path.write_text(re.sub(r'"tile": \d+', '"tile": Infinity', path.read_text())),
        lambda path: path.write_text(re.sub(r'"limits": \{[^}]*\}', '"limits": []', path.read_text())),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_file_that_is_no_measurement_is_measured_anew_and_the_log_says_so(
    damage: Callable[[Path], object], artifact: Artifact, config: ServeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(LIMITS)
    costs_for(artifact, engine, config)
    path = cache_path(artifact, engine, config)
    damage(path)
    engine.batches.clear()
    assert costs_for(artifact, engine, config).is_measured
    assert engine.batches
    said = [record.message for record in caplog.records if str(path) in record.message]
    assert any("is ignored" in message or "measuring anew" in message for message in said)
    if path.is_file():
        engine.batches.clear()
        costs_for(artifact, engine, config)
        assert not engine.batches


def test_a_file_of_other_limits_is_not_used_while_serving_and_the_log_says_what_is(
    artifact: Artifact, config: ServeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(LIMITS)
    former = costs_for(artifact, engine, config)
    path = cache_path(artifact, engine, config)
    path.write_text(path.read_text().replace('"max_seq_len": 16', '"max_seq_len": 15'))
    engine.batches.clear()
    caplog.clear()
    costs_while_serving(artifact, engine, config, former)
    assert not engine.batches
    (message,) = [record.message for record in caplog.records if str(path) in record.message]
    assert "of the former engine" in message
    assert "measuring" not in message


def test_a_cache_that_cannot_be_written_is_a_warning(
    artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")  # also refuses a privileged user, whom permissions do not stop
    config = ServeConfig(cache_dir=str(tmp_path / "file"))
    assert costs_for(artifact, FakeEngine(LIMITS), config).is_measured
    assert any(
        record.levelno == logging.WARNING and "the next start measures again" in record.message
        for record in caplog.records
    )


def test_a_write_that_fails_leaves_nothing_behind(
    artifact: Artifact, config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("bei.artifact.cost_cache.os.replace", full)
    assert costs_for(artifact, FakeEngine(LIMITS), config).is_measured
    assert not list((Path(config.cache_dir) / "costs").iterdir())


def test_tune_off_assumes_and_runs_nothing(artifact: Artifact, config: ServeConfig) -> None:
    engine = FakeEngine(LIMITS)
    costs_for(artifact, engine, config)
    engine.batches.clear()
    model = costs_for(artifact, engine, ServeConfig(cache_dir=config.cache_dir, tune="off"))
    assert not model.is_measured
    assert not engine.batches


def test_tune_force_measures_though_the_cache_knows(artifact: Artifact, config: ServeConfig) -> None:
    engine = FakeEngine(LIMITS)
    costs_for(artifact, engine, config)
    path = cache_path(artifact, engine, config)
    written = json.loads(path.read_text())
    written["data"]["coefficients"]["per_step"] = 1e6
    path.write_text(json.dumps(written))
    assert costs_for(artifact, engine, config).seconds(8, 1, 8) > 1e5
    forced = ServeConfig(**{**vars(config), "tune": "force"})
    assert costs_for(artifact, engine, forced).seconds(8, 1, 8) < 1e5
    assert costs_for(artifact, engine, config).seconds(8, 1, 8) < 1e5


# Streams.


class CPUEngine(FakeEngine):
    """Of target ``cpu``; counts how many are open."""

    num_open = 0
    made: list[int]

    def __init__(self, num_streams: int | None) -> None:
        num_streams = num_streams or 1
        super().__init__(LIMITS, num_streams)
        self.info = type(self.info)(**{**vars(self.info), "target": "cpu"})
        CPUEngine.num_open += 1
        CPUEngine.made.append(num_streams)

    def close(self) -> None:
        CPUEngine.num_open -= 1


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    CPUEngine.num_open, CPUEngine.made = 0, []


@pytest.mark.parametrize(("gain", "chosen"), [(0.7, 1), (1.0, 1), (1.05, 1), (1.3, 2)])
def test_more_streams_must_be_worth_it(gain: float, chosen: int) -> None:
    clock, lock = Clock(), threading.Lock()

    class Streams(CPUEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            with lock:
                clock.now_s += batch.num_tokens / (1000 * (gain if self.info.num_streams == 2 else 1))
            return super().run(batch)

    choice = choose_streams(Streams, [1, 2], clock=clock)
    assert choice.num_streams == chosen
    assert choice.tokens_per_s == pytest.approx({1: 1000, 2: 1000 * gain})
    assert CPUEngine.num_open == 0


def test_a_number_of_streams_is_taken_as_it_is(artifact: Artifact, config: ServeConfig) -> None:
    config = ServeConfig(**{**vars(config), "engine_streams": 2})
    assert engine_for(artifact, config, CPUEngine).info.num_streams == 2
    assert CPUEngine.made == [2]


def test_streams_are_chosen_once_and_read_later(
    artifact: Artifact, config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServeConfig(**{**vars(config), "engine_streams": 0})
    chosen = engine_for(artifact, config, CPUEngine).info.num_streams
    assert chosen in (1, 2)
    assert CPUEngine.num_open == 1
    CPUEngine.made.clear()
    monkeypatch.setattr("bei.scheduler.cost_measurement.choose_streams", lambda *_, **__: pytest.fail("measured again"))
    assert engine_for(artifact, config, CPUEngine).info.num_streams == chosen
    assert set(CPUEngine.made) == {1, chosen}


def test_streams_are_not_chosen_where_measuring_is_off(artifact: Artifact, config: ServeConfig) -> None:
    config = ServeConfig(**{**vars(config), "engine_streams": 0, "tune": "off"})
    with pytest.raises(ConfigError, match="give a number of streams"):
        engine_for(artifact, config, CPUEngine)
    assert CPUEngine.num_open == 0


def test_only_cpu_engines_are_tried_with_several_streams(artifact: Artifact, config: ServeConfig) -> None:
    config = ServeConfig(**{**vars(config), "engine_streams": 0})
    made: list[int | None] = []

    def make_engine(num_streams: int | None) -> FakeEngine:
        made.append(num_streams)
        return FakeEngine(LIMITS, num_streams or 2)

    assert engine_for(artifact, config, make_engine).info.num_streams == 2
    assert made == [None]


def test_without_a_number_the_target_has_as_many_streams_as_it_recommends(
    artifact: Artifact, config: ServeConfig
) -> None:
    assert config.engine_streams is None
    assert engine_for(artifact, config, lambda count: FakeEngine(LIMITS, count or 2)).info.num_streams == 2
    one = ServeConfig(**{**vars(config), "engine_streams": 1})
    assert engine_for(artifact, one, lambda count: FakeEngine(LIMITS, count or 2)).info.num_streams == 1


@pytest.mark.parametrize(("threads", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (64, [1, 2, 4, 8])])
def test_streams_have_a_thread_each(threads: int, expected: list[int]) -> None:
    assert stream_candidates(threads) == expected


def test_the_vocabulary_of_the_artifact_is_used(artifact: Artifact, config: ServeConfig) -> None:
    engine = FakeEngine(LIMITS)
    costs_for(artifact, engine, config)
    assert 4 < max(int(batch.input_ids.max()) for batch in engine.batches) < VOCAB_SIZE


def test_an_assumed_model_is_never_read_from_the_cache(artifact: Artifact, config: ServeConfig) -> None:
    engine = FakeEngine(LIMITS)
    costs_for(artifact, engine, config)
    path = cache_path(artifact, engine, config)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"data": CostModel.assumed(LIMITS).to_json()}))
    assert costs_for(artifact, engine, config).is_measured
