"""The choice of the next step: queue, lanes, ``next_batch``, cost model, and the batch manager's threads."""
