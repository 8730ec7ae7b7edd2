"""Reading a checkpoint in a test, and the refusals that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import BeiError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from tests.support.checkpoints import read_tensors, write_tensors
from tests.support.zoo import CASES, save_case


def saved(folder: Path, name: str) -> Path:
    return save_case(folder, next(case for case in CASES if case.name == name))


def read(folder: Path, max_seq_len: int | None = None, **choice: Any) -> Checkpoint:
    return read_checkpoint(locate(str(folder)), HeadChoice(**choice), max_seq_len)


def refused(folder: Path, error: type[BeiError], message: str, **choice: Any) -> None:
    """Reading ``folder`` or its weights fails so, in one line."""
    with pytest.raises(error, match=message) as info:
        read(folder, **choice).weights().close()
    assert "\n" not in str(info.value)


def without(folder: Path, *names: str) -> Path:
    tensors = read_tensors(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(names)}
    assert len(kept) < len(tensors)
    return write_tensors(folder, kept)
