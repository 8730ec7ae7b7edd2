"""The record of temperatures: how far a model's probabilities are what they say, on labelled texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import msgspec

# Temperatures that may be fitted.
LEAST, MOST = 0.05, 20.0

CalibratedTask: TypeAlias = Literal["classify", "decide"]


class ReliabilityBin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The texts whose likeliest label has a probability in a tenth of 0 to 1: how many, the mean of these
    probabilities, and the share of them that is right; zeros where there are no texts."""

    count: int
    confidence: float
    accuracy: float


class Reliability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``nll``: mean negative log likelihood of the right label, in nats. ``error``: expected calibration error, the
    mean of |accuracy - confidence| over the texts by ``bins`` (arXiv:1706.04599, equation 3), ten of them."""

    nll: float
    error: float
    bins: list[ReliabilityBin]


class ProbabilityCalibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A temperature, fitted on ``num_fitted`` labelled texts of a file (``sha256``), with what it changes on
    ``num_texts`` other texts of that file. ``question``: the JSON of what decisions were asked; empty for the
    model's labels. ``before``: at temperature 1."""

    task: CalibratedTask
    temperature: float
    question: str
    sha256: str
    num_fitted: int
    num_texts: int
    accuracy: float
    before: Reliability
    after: Reliability


def reliability_fault(
    temperatures: Mapping[CalibratedTask, float], records: list[ProbabilityCalibration]
) -> str | None:
    """The first fault of a manifest's temperatures and their records in the certificate, or None."""
    return next(_faults(temperatures, records), None)


def _faults(temperatures: Mapping[CalibratedTask, float], records: list[ProbabilityCalibration]) -> Iterator[str]:
    if {one.task: one.temperature for one in records} != dict(temperatures) or len(records) != len(temperatures):
        yield "its temperatures are not those of the manifest"
    for one in records:
        if not LEAST <= one.temperature <= MOST:
            yield f"the temperature of {one.task} is {one.temperature:g}, and must be from {LEAST:g} to {MOST:g}"
        for found in (one.before, one.after):
            if sum(row.count for row in found.bins) != one.num_texts or not one.num_texts:
                yield f"the bins of {one.task} do not hold its {one.num_texts} texts"
            if not 0 <= found.error <= 1 or not found.nll >= 0:
                yield f"the errors of {one.task} are none"
