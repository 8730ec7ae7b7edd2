"""Reuse of a plan without weights from another fine-tune's artifact, instead of compiling it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from bei.artifact import store
from bei.artifact.manifest import ENGINE_DIR, TENSORRT_GRAPH, TENSORRT_PLAN, EngineRequirements, Manifest
from bei.core import Limits
from bei.errors import CompileError


def plan_source(path: Path) -> Manifest:
    """The manifest of the artifact at ``path``, whose plan has no weights. Raises ArtifactError, CompileError."""
    manifest = store.load(path).manifest
    if manifest.engine.plan is None or not manifest.engine.plan.refit:
        raise CompileError(f"The plan of {path} holds its own weights: build that artifact with --strip-weights.")
    return manifest


def copy_plan(path: Path, wanted: EngineRequirements, precision: str, limits: Limits, folder: Path) -> None:
    """Copy the plan of the artifact at ``path`` to ``folder``, which holds the graph, if compiling would give the same
    plan.

    ``wanted``: the description of that plan. The graphs must be equal byte for byte; weights are in a file of their
    own. Raises CompileError that names the first difference.
    """
    manifest = plan_source(path)
    ours = {"precision": precision, "limits": limits, **msgspec.to_builtins(wanted)}
    theirs = {"precision": manifest.precision, "limits": manifest.limits, **msgspec.to_builtins(manifest.engine)}
    for what, value in ours.items():
        if theirs[what] != value:
            raise CompileError(
                f"The plan of {path} is not what this build asks for: its {what.replace('_', ' ')} is {theirs[what]}, "
                f"not {value}. Build with the same settings on the same GPU, or without --plan-of."
            )
    if (path / ENGINE_DIR / TENSORRT_GRAPH).read_bytes() != (folder / TENSORRT_GRAPH).read_bytes():
        raise CompileError(
            f"The plan of {path} was built from another graph: the models differ in more than their weights."
        )
    shutil.copyfile(path / ENGINE_DIR / TENSORRT_PLAN, folder / TENSORRT_PLAN)
