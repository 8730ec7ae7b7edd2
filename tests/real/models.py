"""The table of real models, ``models.yaml``: their packages, licences, and conversions to checkpoints.

Wrapper licences are what the package declares, model licences what the weights carry upstream: the second one counts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tests.real import conversions
from tests.real.conversions import Conversion
from tests.real.packages import Package

Kind = Literal["embed", "embed_tokens", "rerank", "classify", "language_model", "data"]


@dataclass(frozen=True)
class RealModel:
    """One checkpoint. ``architecture`` is the Hugging Face class, or model2vec's StaticModel; ``prompts`` are what the
    model card puts in front.

    ``has_original``: ONNX Runtime can run the export that was converted, in the precision it is meant for.
    """

    name: str
    packages: tuple[Package, ...]
    kind: Kind
    model: str
    licence: str
    wrapper_licence: str
    convert: Conversion
    architecture: str = ""
    pooling: str = ""
    prompts: dict[str, str] = field(default_factory=dict)
    has_original: bool = False

    @property
    def is_static(self) -> bool:
        """True for a table of vectors, which transformers has no class of."""
        return self.architecture == "StaticModel"

    @property
    def megabytes(self) -> int:
        """Size of the download."""
        return sum(package.megabytes for package in self.packages)


def cache_dir() -> Path:
    """The folder of checkpoints: ``BEITEST_REAL_MODELS``, else below the user's cache."""
    configured = os.environ.get("BEITEST_REAL_MODELS")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "bei" / "real-models"


def _model(name: str, fields: dict[str, Any], packages: dict[str, list[dict[str, Any]]]) -> RealModel:
    steps = fields.pop("convert")
    named = tuple(Package(**package) for key in fields.pop("packages") for package in packages[key])
    return RealModel(name=name, packages=named, convert=_conversion(steps, fields), **fields)


def _conversion(steps: dict[str, dict[str, Any]], about: dict[str, Any]) -> Conversion:
    """The first step makes a checkpoint, the others complete it; facts of the model are their defaults."""
    conversion: Conversion | None = None
    for name, step in steps.items():
        arguments = dict(step)
        if name == "from_onnx":
            arguments = {"architecture": about["architecture"], **_with_labels(arguments)}
        elif name == "embedder":
            arguments = {"pooling": about["pooling"], "prompts": about.get("prompts"), **arguments}
        before = [] if conversion is None else [conversion]
        conversion = getattr(conversions, name)(*before, **arguments)
    assert conversion is not None
    return conversion


def _with_labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """``labels``, those of a classifier of one label, become settings of config.json."""
    labels: list[str] = arguments.pop("labels", [])
    if labels:
        settings = {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {name: index for index, name in enumerate(labels)},
            "problem_type": "single_label_classification",
        }
        key = "config" if "config" in arguments else "overrides"
        arguments[key] = {**arguments.get(key, {}), **settings}
    return arguments


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MODELS: tuple[RealModel, ...] = tuple(
    _model(name, fields, _TABLE["packages"]) for name, fields in _TABLE["models"].items()
)
BY_NAME = {model.name: model for model in MODELS}
