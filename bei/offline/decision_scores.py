"""Scores of a question's options, as ``bei calibrate`` fits them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bei.core import Float32Array
from bei.offline import methods
from bei.offline.model import Model
from bei.tasks.questions import AskedQuestion


def decision_scores(model: Model, texts: Iterable[str], question: AskedQuestion) -> Float32Array:
    """Float32 [n, options] before temperature and softmax. Raises as ``Model.decide``."""
    rows = model._runner.gather(methods.decision_scores(model._runner.service, question), texts)
    return np.stack(rows)
