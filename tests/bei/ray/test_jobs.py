"""Where the workers of a job are placed, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from bei.ray.jobs import Cluster, _placement


@given(cpus=st.lists(st.integers(1, 64), min_size=1, max_size=6), workers=st.integers(1, 40))
def test_every_worker_fits_on_a_node_and_has_as_many_cpus_as_can_be(cpus: list[int], workers: int) -> None:
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": float(count)}} for count in cpus])
    placement = _placement(ray, "cpu", Cluster("auto", workers))
    room = sum(count // placement.num_cpus for count in cpus)
    assert room >= min(workers, sum(cpus))
    assert sum(count // (placement.num_cpus + 1) for count in cpus) < workers
