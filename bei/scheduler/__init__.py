"""What runs next: queue, lanes, ``next_batch``, cost model, and the batch manager's threads."""
