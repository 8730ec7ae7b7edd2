"""The verdict on a structure: bei builds it and answers like the reference, refuses it by name, or is at fault."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

from bei.errors import (
    BuildError,
    ConfigError,
    HubUnreachableError,
    MissingDependencyError,
    UnsupportedArchitectureError,
    VerificationError,
)
from bei_build.checkpoint import gliner_folder
from bei_build.checkpoint.locate import Location
from bei_build.reference import held_out
from tests.hub_matrix.checkpoint import save
from tests.hub_matrix.expected import Answers, expected_answers
from tests.hub_matrix.served import served_answers
from tests.hub_matrix.structures import Structure
from tests.support.builds import build_artifact

TOLERANCE = 2e-4
_NUM_TEXTS = 12  # of the held-out ones: the comparison here is the one that counts
_FIRST_SENTENCE = ". "

Kind = Literal["builds and matches", "refused", "WRONG", "CRASHES"]


@dataclass(frozen=True)
class Verdict:
    """``detail``: the difference, the reason, or what went wrong. ``num_compared``: texts and pairs whose token ids the
    build has compared with transformers'."""

    kind: Kind
    detail: str
    num_compared: int = field(default=0, compare=False)

    @property
    def is_fault(self) -> bool:
        """True for a defect of bei."""
        return self.kind in ("WRONG", "CRASHES")

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.kind == "builds and matches" else f"{self.kind}: {self.detail}"


def verdict_of(structure: Structure) -> Verdict:
    """Make the random checkpoint of ``structure``, build it, and compare what it answers."""
    texts = held_out.held_out_texts()[:_NUM_TEXTS]
    whole, held_out.held_out_texts = held_out.held_out_texts, lambda: texts
    unreachable = patch.object(gliner_folder, "locate", _unreachable)
    try:
        with tempfile.TemporaryDirectory() as scratch, unreachable:
            return _verdict(structure, Path(scratch))
    finally:
        held_out.held_out_texts = whole


def _unreachable(model: str, **_: Any) -> Location:
    """Verdicts are the same with and without the hub."""
    raise HubUnreachableError(f"{model!r} is not asked for here.")


def _verdict(structure: Structure, scratch: Path) -> Verdict:
    folder = scratch / "checkpoint"
    model = save(structure, folder)
    try:
        artifact = build_artifact(folder, scratch / "artifact", all_tokens=True, **structure.options)
    except UnsupportedArchitectureError as error:
        if structure.can_be_compared:
            expected_answers(structure, model, folder)  # or the entry would fail when the family comes
        return Verdict("refused", _reason(error, folder))
    except VerificationError as error:
        return Verdict("WRONG", _reason(error, folder))
    except (BuildError, ConfigError, MissingDependencyError) as error:
        return Verdict("refused", _reason(error, folder))
    except Exception as error:  # the builder is to say by name what it cannot build
        return Verdict("CRASHES", f"{type(error).__name__}: {_reason(error, folder)}")
    if not structure.can_be_compared:
        return Verdict("WRONG", "builds, and nothing here says what is right")
    if structure.task not in artifact.manifest.tasks:
        return Verdict("WRONG", f"builds for {', '.join(artifact.manifest.tasks)}, not for {structure.task}")
    tokens = artifact.certificate.tokens
    return replace(
        _compared(structure, model, folder, artifact), num_compared=tokens.num_texts + tokens.num_pairs if tokens else 0
    )


def _compared(structure: Structure, model: Any, folder: Path, artifact: Any) -> Verdict:
    expected = expected_answers(structure, model, folder)
    try:
        actual = served_answers(structure, artifact)
    except Exception as error:  # whatever a served model raises is what a client would see
        return Verdict("CRASHES", f"{type(error).__name__}: {_reason(error, folder)}")
    if shapes := _other_shapes(actual, expected):
        return Verdict("WRONG", shapes)
    difference = max(
        float(np.abs(ours - theirs).max())
        for task in expected
        for ours, theirs in zip(actual[task], expected[task], strict=True)
    )
    if not difference <= TOLERANCE:  # NaN too
        return Verdict("WRONG", f"differs by {difference:.1e}")
    return Verdict("builds and matches", f"{difference:.0e}")


def _other_shapes(actual: Answers, expected: Answers) -> str:
    ours, theirs = ({task: [row.shape for row in rows] for task, rows in side.items()} for side in (actual, expected))
    return "" if ours == theirs else f"answers have the shapes {ours}, not {theirs}"


def _reason(error: Exception, folder: Path) -> str:
    """The first sentence of the message, on one line, without this machine's folders."""
    text = " ".join(str(error).split()).replace(f"{folder}/", "").replace(str(folder), "the folder")
    return text.split(_FIRST_SENTENCE)[0].rstrip(".")
