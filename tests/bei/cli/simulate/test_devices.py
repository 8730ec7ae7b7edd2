"""Tables of costs: those that come with bei, and files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.cost_cache import CostCache
from bei.cli.simulate import devices
from bei.cli.simulate.devices import TABLES, SimulatedDevices, read_table
from bei.core import Limits
from bei.errors import ConfigError
from bei.scheduler.cost_model import CostModel

LIMITS = Limits(1024, 64, 256)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_a_gpu_is_an_assumption_that_gives_the_rate_its_source_publishes(name: str) -> None:
    table = read_table(name)
    content = json.loads((Path(devices.__file__).parent / "tables" / f"{name}.json").read_text())
    published = content["published"]
    assert table.is_assumed
    assert content["source"] in table.source
    assert content["assumptions"]
    seconds = table.model().seconds(16_384, 64, 256)
    assert 16_384 / seconds == pytest.approx(published["tokens_per_s"], rel=0.001)


def test_what_bei_tune_kept_is_read_with_its_streams(tmp_path: Path) -> None:
    model = CostModel.assumed(LIMITS)
    key = {"device": "a processor", "threads": 2, "library": "openvino 1", "streams": 3}
    path = CostCache(tmp_path).write("minilm", key, {**model.to_json(), "is_measured": True})
    table = read_table(str(path))
    assert (table.num_streams, table.is_assumed) == (3, False)
    assert "a processor" in table.source
    assert table.model().seconds(100, 4, 30) == model.seconds(100, 4, 30)
    assert SimulatedDevices(table, 2).num_streams == 6


def test_a_model_s_plain_data_is_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CostModel.assumed(LIMITS).to_json()))
    assert read_table(str(path)).is_assumed
    assert SimulatedDevices(read_table(str(path))).limits == LIMITS


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    content = json.dumps(CostModel.assumed(LIMITS).to_json())
    path.write_text('{"is_measured": true, ' + content[1:])
    with pytest.raises(ConfigError, match="it has the key 'is_measured' twice"):
        read_table(str(path))


BAD: list[Any] = [1, [], {}, {"key": {}, "data": 1}, {"coefficients": {}}, {"device": "a", "model": "b", "source": "c"}]


@pytest.mark.parametrize("content", [*map(json.dumps, BAD), "{", "[" * 100_000], ids=range(len(BAD) + 2))
def test_a_file_that_holds_no_table_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"costs\.json holds no table"):
        read_table(str(path))


def test_a_table_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="l4-bge-large"):
        read_table(str(tmp_path / "missing"))
