"""The engine against a stand-in of TensorRT and a simulated device: see ``contracts``, ``library``, ``device``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bei.engine.tensorrt import contracts
from tests.bei.engine.tensorrt.rig import GRAPHS_MB, Graphs, Rig, batch_of

Contract = Callable[[Rig], None]

CONTRACTS: list[Contract] = [
    contracts.answers_of_both_profiles,
    contracts.two_batches_in_flight,
    contracts.profile_of_a_batch,
    contracts.answers_are_the_caller_s,
    contracts.recorded_steps,
    contracts.a_refused_step_leaves_nothing,
    contracts.memory_is_allocated_once,
    contracts.a_failed_load_leaves_nothing,
    contracts.closing_frees_everything,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_the_engine_keeps_its_contract(contract: Contract, rig: Rig) -> None:
    contract(rig)


def test_only_outputs_that_are_asked_for_are_copied_and_no_filler(many_outputs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, many_outputs)
    batch = batch_of([5, 6, 7])
    widths = {output.name: output.dimension for output in many_outputs.outputs}
    rows = {"embedding": 3, "token_weights": 18, "token_embedding": 18, "sparse": 3}
    with rig.engine(num_streams=1) as engine:
        for outputs in ({"embedding"}, {"token_weights", "sparse"}, set(widths), None, set()):
            rig.device.copied.clear()
            rig.check(engine, batch, None if outputs is None else frozenset(outputs))
            asked = list(widths) if outputs is None else [name for name in widths if name in outputs]
            downloads = [size for name, size in rig.device.copied if name == "download"]
            assert downloads == [4 * rows[name] * widths[name] for name in asked]
            assert [name for name, _ in rig.device.copied].count("upload") == 1


def test_recorded_steps_answer_outputs_per_token(many_outputs: Graphs, tmp_path: Path) -> None:
    rig = Rig(tmp_path, many_outputs)
    with rig.engine(num_streams=1, cuda_graphs=GRAPHS_MB, warm=True) as engine:
        launched = rig.device.calls["cudaGraphLaunch"]
        for seed, lengths in enumerate(([3], [5, 6, 7], [60, 1])):
            rig.check(engine, batch_of(lengths, seed))
        assert rig.device.calls["cudaGraphLaunch"] == launched + 3


def test_it_states_its_facts(rig: Rig) -> None:
    with rig.engine(num_streams=3) as engine:
        info = engine.info
        assert (info.target, info.device, info.num_streams) == ("tensorrt", "NVIDIA H200 (SM90)", 3)
        assert info.limits == rig.manifest.limits
        assert info.outputs == {"embedding": 64}
        assert info.token_buckets == ()
        assert info.memory_bytes == rig.device.memory.used


def test_tokens_are_filled_up_to_what_is_recorded(rig: Rig) -> None:
    with rig.engine(cuda_graphs=GRAPHS_MB) as engine:
        assert engine.info.token_buckets == (16, 32, 64)
