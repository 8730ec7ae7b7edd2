"""Settings without meaning for the model at hand are refused, because the build would ignore them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bei.errors import ConfigError
from bei_build.applicable_settings import check_applicable
from bei_build.checkpoint import locate as location
from bei_build.checkpoint.locate import locate
from bei_build.config import BuildConfig
from tests.support.checkpoints import save_checkpoint
from tests.support.reading import read

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedder": ("Model", {}),
    "classifier": ("ForSequenceClassification", {"num_labels": 3}),
    "reranker": ("ForSequenceClassification", {"num_labels": 1}),
    "ner": ("ForTokenClassification", {"num_labels": 3}),
    "splade": ("ForMaskedLM", {}),
}
TEMPLATE = {"rerank_body": "{query} {document}"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: save_checkpoint(folder / kind, task=task, **config) for kind, (task, config) in TASKS.items()}


def check(folder: Path, **settings: Any) -> None:
    check_applicable(BuildConfig(model=str(folder), **settings), read(folder))


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"normalize": True}, ["embedder"]),
        ({"normalize": False}, ["embedder"]),
        ({"include_prompt": True}, ["embedder"]),
        ({"include_prompt": False}, ["embedder"]),
        ({"prompts": {"query": "query: "}}, ["embedder", "splade"]),
        (TEMPLATE, ["reranker"]),
    ],
    ids=str,
)
def test_it_is_accepted_of_models_that_it_changes_and_of_no_others(
    settings: dict[str, Any], kinds: list[str], checkpoints: dict[str, Path]
) -> None:
    """A template turned a reranker with three labels into one by the first label."""
    (name,) = settings
    for kind, folder in checkpoints.items():
        if kind in kinds:
            check(folder, **settings)
        else:
            with pytest.raises(ConfigError, match=rf"^{name} (works? with|needs) .*[Ll]eave (it|them) out\.$"):
                check(folder, **settings)


def test_a_revision_is_of_the_hub_alone(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints["embedder"]
    monkeypatch.setattr(location, "_package_folder", lambda model: folder)
    for model, what in ((str(folder), "is a folder"), ("package", "is an installed package")):
        with pytest.raises(
            ConfigError, match=rf"^revision main works with repositories on the hub only, and {model} {what}"
        ):
            locate(model, "main")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "int8", "calibration_percentile": 99.0}, "needs --calibration-method percentile: set both"),
        ({**TEMPLATE, "rerank_instruction": "judge"}, r"rerank_instruction is for the slot \{instruction\}"),
    ],
    ids=str,
)
def test_half_of_a_pair_of_settings_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(model="x", **settings)
    BuildConfig(model="x", precision="int8", calibration_percentile=99.0, calibration_method="percentile")
    BuildConfig(model="x", rerank_body="{instruction} {query} {document}", rerank_instruction="judge")
