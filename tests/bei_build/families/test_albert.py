"""ALBERT: refused forms of sharing, and shared weights, which are stored once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bei.errors import CheckpointError
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_config
from tests.support.reading import read, refused, saved
from tests.support.zoo import CASES, save_case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_group_num": 2}, "inner_group_num = 2; bei's albert family supports only 1"),
        ({"num_hidden_groups": 0}, "num_hidden_groups = 0 for 3 layers: each group must have a layer"),
        ({"num_hidden_groups": 4}, "num_hidden_groups = 4 for 3 layers"),
        ({"hidden_act": "laplace"}, "Activation 'laplace' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(change_config(saved(tmp_path, "AlbertModel"), **changes), CheckpointError, message)


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "groups"), [(3, 2, (0, 0, 1)), (4, 4, (0, 1, 2, 3)), (5, 1, (0,) * 5)]
)
def test_layers_read_the_weights_of_their_group(
    num_layers: int, num_groups: int, groups: tuple[int, ...], tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == "AlbertModel")
    settings = {**case.settings, "num_hidden_layers": num_layers, "num_hidden_groups": num_groups}
    checkpoint = read(save_case(tmp_path, replace(case, settings=settings)))
    assert checkpoint.spec.weights_of == groups
    checkpoint.weights().close()


def test_an_engine_holds_shared_weights_once(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "AlbertModel")
    sizes = []
    for num_layers in (1, 6):
        settings = {**case.settings, "num_hidden_groups": 1, "num_hidden_layers": num_layers, "intermediate_size": 2048}
        folder = save_case(tmp_path / str(num_layers), replace(case, settings=settings))
        artifact = build_artifact(folder, tmp_path / f"artifact-{num_layers}")
        sizes.append(max(file.stat().st_size for file in artifact.engine_dir.iterdir()))
    assert sizes[1] < 1.2 * sizes[0]
