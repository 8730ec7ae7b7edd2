"""The batch manager over an engine on a simulated device: failures have the same effects as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import runtime

from bei.core import Encoding, PackedBatch
from bei.errors import EngineDeadError
from tests.bei.engine.tensorrt.rig import Rig
from tests.bei.scheduler.front import Front, Request, metric
from tests.support.builds import random_encodings

OUT_OF_MEMORY = runtime.cudaError_t.cudaErrorMemoryAllocation


def check(rig: Rig, request: Request, encodings: list[Encoding]) -> None:
    """Check the answer of every input."""
    assert request.error is None
    for row, encoding in zip(request.rows, encodings, strict=True):
        assert row is not None
        expected = rig.graphs.expected(PackedBatch.from_encodings([encoding]))["embedding"][0]
        np.testing.assert_allclose(row["embedding"], expected, rtol=0, atol=2e-5)


def test_a_step_without_memory_is_halved_and_everybody_is_answered(rig: Rig) -> None:
    encodings = random_encodings([7, 9, 20, 33, 5, 6, 41, 12], vocab_size=60)
    with rig.engine() as engine:
        front = Front(engine)
        rig.device.fail("cudaMemcpyAsync", OUT_OF_MEMORY, times=2)
        request = front.submit_encodings(encodings)
        front.wait(request)
        check(rig, request, encodings)
        assert metric(front, "bei_batch_failures_total", kind="exception") == 2
        front.close()


def test_many_requests_over_two_streams_get_their_own_answers(rig: Rig) -> None:
    with rig.engine(num_streams=2) as engine:
        front = Front(engine)
        sent = [random_encodings([3 + seed, 30, 11], vocab_size=60, seed=seed) for seed in range(12)]
        requests = [front.submit_encodings(encodings) for encodings in sent]
        front.wait(*requests)
        for request, encodings in zip(requests, sent, strict=True):
            check(rig, request, encodings)
        front.close()


def test_a_gpu_that_is_lost_ends_the_manager_in_its_own_words(rig: Rig) -> None:
    engine = rig.load()
    front = Front(engine)
    rig.device.fail("kernel", runtime.cudaError_t.cudaErrorIllegalAddress, is_sticky=True)
    request = front.submit_encodings(random_encodings([7, 9], vocab_size=60))
    front.wait(request)
    assert type(request.error) is EngineDeadError
    with pytest.raises(EngineDeadError, match=r"GPU does not answer .*cudaErrorIllegalAddress.*restart the server"):
        front.submit_encodings(random_encodings([3], vocab_size=60))
    assert not front.manager.stats().is_alive
    front.close()
