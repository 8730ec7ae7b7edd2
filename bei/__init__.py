"""bei: an embedding, reranking and classification server with engines compiled ahead of time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bei.version import __version__ as __version__

if TYPE_CHECKING:
    from bei.offline.model import Model as Model
    from bei.offline.results import Chunk as Chunk
    from bei.offline.results import Extracted as Extracted
    from bei.offline.results import Predictions as Predictions
    from bei.offline.results import Rank as Rank
    from bei.offline.results import Report as Report
    from bei.offline.results import SparseVector as SparseVector
    from bei.offline.results import Token as Token
    from bei.tasks.entities import Entity as Entity
    from bei.tasks.extract import Span as Span
    from bei.tasks.questions import ChoiceAnswer as ChoiceAnswer
    from bei.tasks.questions import NoulAnswer as NoulAnswer
    from bei.tasks.questions import ScoreAnswer as ScoreAnswer
    from bei.tasks.schema_classes import LabelScore as LabelScore
    from bei.tasks.schema_spans import Value as Value
else:
    _MODULES = {
        "Model": "bei.offline.model",
        "Entity": "bei.tasks.entities",
        "Span": "bei.tasks.extract",
        "LabelScore": "bei.tasks.schema_classes",
        "Value": "bei.tasks.schema_spans",
        **dict.fromkeys(
            ("Chunk", "Extracted", "Predictions", "Rank", "Report", "SparseVector", "Token"),
            "bei.offline.results",
        ),
        **dict.fromkeys(("ChoiceAnswer", "NoulAnswer", "ScoreAnswer"), "bei.tasks.questions"),
    }

    def __getattr__(name: str) -> object:
        """``bei.Model`` and the types of its results, imported on first use: they need numpy and a tokenizer."""
        if name not in _MODULES:
            raise AttributeError(f"module 'bei' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
