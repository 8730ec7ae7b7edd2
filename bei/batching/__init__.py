"""Batching: what waits (``queue``), what runs together (``policy``), and the threads that do it (``manager``)."""

from bei.batching.manager import BatchManager
from bei.batching.policy import QueueKey, next_batch
from bei.batching.steps import SchedulingRules

__all__ = ["BatchManager", "QueueKey", "SchedulingRules", "next_batch"]
