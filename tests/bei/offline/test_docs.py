"""docs/python.md has every method, option and setting, and its code is Python."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import bei
from bei import Model
from bei.config.settings import ServeConfig
from bei.offline import options
from bei.offline.settings import ModelSettings

PAGE = (Path(__file__).parents[3] / "docs" / "python.md").read_text("utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", [name for name in vars(Model) if not name.startswith("_")])
def test_a_method_is_described(name: str) -> None:
    assert re.search(rf"`(model\.)?{name}(\(|`)", PAGE)


def test_all_options_are_described_and_no_others() -> None:
    kinds = [kind for name, kind in vars(options).items() if name.endswith("Options")]
    known = {name for kind in kinds for name in kind.__optional_keys__} | {"report", "progress", "chunk_size"}
    rows = [line.split("|")[1] for line in section("Options").splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == known


def test_all_settings_are_described_and_of_the_server_s_types() -> None:
    (paragraph,) = re.findall(r"Settings are those.*?\n\n", section("Opening a model"), re.DOTALL)
    assert set(re.findall(r"`([a-z_]+)`", paragraph)) == ModelSettings.__optional_keys__
    ours, theirs = get_type_hints(ModelSettings), get_type_hints(ServeConfig)
    assert {name: hint for name, hint in ours.items() if hint != theirs[name]}.keys() == {"cache_dir"}  # also a Path


def test_the_types_that_it_names_are_imported_from_bei() -> None:
    (names,) = re.findall(r"The types are imported from `bei`: (.*?)\.", section("Methods"))
    for name in re.findall(r"`(\w+)`", names):
        assert getattr(bei, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        bei.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_signatures_spell_the_options_out_that_are_no_fields_of_requests() -> None:
    assert str(inspect.signature(Model.embed)) == (
        "(self, inputs: 'Iterable[GivenInput]', *, report: 'Report | None' = None, progress: 'Progress' = False, "
        "**options: 'Unpack[EmbedOptions]') -> 'Vectors'"
    )
    assert str(inspect.signature(Model.aembed_iter)) == (
        "(self, inputs: 'GivenStream', *, chunk_size: 'int' = 256, report: 'Report | None' = None, "
        "progress: 'Progress' = False, **options: 'Unpack[EmbedOptions]') -> "
        "'AsyncIterator[Chunk[TextOrImage, Vectors]]'"
    )


def test_its_code_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        ast.parse(block)
