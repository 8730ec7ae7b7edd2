"""Batching: what waits (``queue``), what runs together (``policy``, ``scheduler``), and the threads (``manager``)."""

from bei.batching.manager import BatchManager
from bei.batching.policy import QueueKey, next_batch
from bei.batching.scheduler import SchedulingRules

__all__ = ["BatchManager", "QueueKey", "SchedulingRules", "next_batch"]
