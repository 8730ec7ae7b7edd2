"""``bei.Model``: a model in the caller's own process, by the tasks and the engine port that HTTP uses (docs/python.md).

Layers: ``model`` (the methods), ``caller`` (runs them for threads and event loops), ``jobs`` (what each asks of the
service), ``flow`` (back-pressure), ``host`` (the service on a thread of its own).
"""

from bei.model.model import Model
from bei.model.results import Chunk, LabelScore, Predictions, Rank, Report, SparseVector, Token

__all__ = ["Chunk", "LabelScore", "Model", "Predictions", "Rank", "Report", "SparseVector", "Token"]
