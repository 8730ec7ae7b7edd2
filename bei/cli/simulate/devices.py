"""Simulated devices: step times from a table that names its source.

The GPUs in ``tables/`` are assumptions derived from published figures: no GPU has been measured. A table of a measured
engine is a file of the cost cache, written by ``bei tune`` and the first ``bei serve``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bei.core import Limits
from bei.errors import ConfigError
from bei.scheduler.cost_model import CostModel
from bei.utils.untrusted_files import read_bounded, unique_keys

_FOLDER = Path(__file__).parent / "tables"
TABLES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@dataclass(frozen=True)
class CostTable:
    """Step times on one stream of a device while all streams are busy; ``source``: their origin.

    ``costs``: the plain data of a ``CostModel``. ``is_assumed``: not measured.
    """

    name: str
    source: str
    is_assumed: bool
    num_streams: int
    costs: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.num_streams < 1:
            raise ValueError(f"a device needs at least one stream, not {self.num_streams}")

    def model(self) -> CostModel:
        """A new cost model, whose observations affect no other. Raises KeyError, TypeError or ValueError."""
        return CostModel.from_json({"is_measured": True, "speed": 1.0, **self.costs})


@dataclass(frozen=True)
class SimulatedDevices:
    """``num_devices`` equal devices that share one queue.

    ``ratios``: observed step times of a real engine relative to the table's, applied in turn and cyclically. The
    scheduler does not know them, and observes steps.
    """

    table: CostTable
    num_devices: int = 1
    ratios: Seq[float] = (1.0,)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or not self.ratios or not all(0 < ratio < inf for ratio in self.ratios):
            raise ValueError(f"no fleet: {self.num_devices} devices, steps that take {self.ratios} times as long")

    @property
    def num_streams(self) -> int:
        """Number of concurrent steps."""
        return self.num_devices * self.table.num_streams

    @property
    def limits(self) -> Limits:
        return self.table.model().limits


def read_table(name: str) -> CostTable:
    """The table called ``name`` (``TABLES``), or the one in the file with this path.

    A file holds a table as in ``tables/``, a cost model of the cost cache, or a cost model's plain data. Raises
    ConfigError.
    """
    path = _FOLDER / f"{name}.json" if name in TABLES else Path(name)
    try:
        table = _table_of(path, json.loads(read_bounded(path), object_pairs_hook=unique_keys))
        table.model()
    except FileNotFoundError:
        raise ConfigError(
            f"{name} is no table of costs: give one of {', '.join(TABLES)}, or a file that bei tune has written."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no table of costs ({type(error).__name__}: {error}): give a file that bei tune has written."
        ) from error
    return table


def _table_of(path: Path, content: dict[str, Any]) -> CostTable:
    if "key" in content:  # a file of the cost cache
        key = content["key"]
        source = f"measured on {key['device']}, {key['threads']} threads, {key['library']}: {path.name}"
        return CostTable(path.stem, source, not content["data"]["is_measured"], int(key["streams"]), content["data"])
    if "coefficients" in content:
        return CostTable(path.stem, str(path), not content["is_measured"], 1, content)
    source = f"{content['device']}, {content['model']}. {content['source']}"
    return CostTable(path.stem, source, True, int(content["num_streams"]), content["costs"])
