"""Every recipe in configs/ is a valid build configuration of a target that exists."""

from pathlib import Path

import pytest

from bei.config import load
from bei_build.config import BuildConfig
from bei_build.targets import compiler_for

RECIPES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_loads_and_names_a_model_and_a_target(recipe: Path) -> None:
    config = load(BuildConfig, {}, str(recipe), env={})
    assert config.model
    assert (config.name or "").lower() == recipe.stem
    assert compiler_for(config.target).resolve_precision("auto")
