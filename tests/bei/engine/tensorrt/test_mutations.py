"""Each contract fails if the call that it guards is removed from the engine: the changed source is executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest

from bei.engine.tensorrt import cuda, device_stream, engine, plan
from bei.errors import EngineError
from tests.bei.engine.tensorrt import contracts
from tests.bei.engine.tensorrt import rig as rig_module
from tests.bei.engine.tensorrt.rig import Rig


class Mutation(NamedTuple):
    """``old`` occurs once in the source of ``module`` and is replaced by ``new``; ``name``: the class that changes."""

    title: str
    module: ModuleType
    name: str
    old: str
    new: str
    contract: Callable[[Rig], None]


MUTATIONS = [
    Mutation(
        "a plan is loaded before there is a CUDA context",
        engine,
        "TensorRTEngine",
        "        self._cuda.use_device()\n",
        "",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "nobody waits for the step",
        device_stream,
        "PlanStream",
        "        self._cuda.wait(self._done)\n",
        "",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "inputs are not copied to the device",
        device_stream,
        "PlanStream",
        "        self._cuda.upload(self._inputs, size, self._stream)\n",
        "",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "results are not copied to the host",
        cuda,
        "Cuda",
        'self.call("cudaMemcpyAsync", block.host_address + offset',
        '("cudaMemcpyAsync", block.host_address + offset',
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "no profile is chosen",
        plan,
        "LoadedPlan",
        "if not context.set_optimization_profile_async(profile.index, int(stream)):",
        "if False:",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "all contexts are of the first profile",
        plan,
        "LoadedPlan",
        "set_optimization_profile_async(profile.index,",
        "set_optimization_profile_async(0,",
        contracts.profile_of_a_batch,
    ),
    Mutation(
        "the wide profile takes everything",
        plan,
        "LoadedPlan",
        "for profile in self.profiles[first:]:\n            if profile.holds",
        "for profile in self.profiles[::-1]:\n            if profile.holds",
        contracts.profile_of_a_batch,
    ),
    Mutation(
        "inputs have no address",
        device_stream,
        "PlanStream",
        "if not held.context.set_tensor_address(name, self._inputs.device + offsets[name]):",
        "if False:",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "all inputs have the first one's address",
        device_stream,
        "PlanStream",
        "self._inputs.device + offsets[name]",
        "self._inputs.device",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "shapes are not set",
        device_stream,
        "PlanStream",
        "if not held.context.set_input_shape(name, array.shape):",
        "if False:",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "contexts have no activation memory",
        plan,
        "LoadedPlan",
        "context.set_device_memory(activations, self.activation_bytes)\n",
        "pass\n",
        contracts.answers_of_both_profiles,
    ),
    Mutation(
        "two batches share one stream's buffers",
        engine,
        "TensorRTEngine",
        "StreamPool(streams)",
        "StreamPool(streams[:1] * len(streams))",
        contracts.two_batches_in_flight,
    ),
    Mutation(
        "streams share their activation memory",
        device_stream,
        "PlanStream",
        "self._activations = cuda.device_memory(self._activation_bytes, resources)",
        'self._activations = plan.__dict__.setdefault("shared", None) or plan.__dict__.update(\n'
        "            shared=cuda.device_memory(self._activation_bytes, resources)) or plan.shared",
        contracts.two_batches_in_flight,
    ),
    Mutation(
        "answers are views of the buffer",
        device_stream,
        "PlanStream",
        ".reshape(-1, output.dimension).copy()",
        ".reshape(-1, output.dimension)",
        contracts.answers_are_the_caller_s,
    ),
    Mutation(
        "a failed step is not waited for",
        device_stream,
        "PlanStream",
        "            self._settle(error)\n            raise\n\n    def _enqueue",
        "            raise\n\n    def _enqueue",
        contracts.a_refused_step_leaves_nothing,
    ),
    Mutation(
        "a recorded step's inputs are not copied",
        device_stream,
        "PlanStream",
        "                self._upload(graph_inputs(batch, self._plan.input_names, captured.sizes))\n",
        "",
        contracts.recorded_steps,
    ),
    Mutation(
        "a recorded step's inputs lie as those of an unrecorded one",
        device_stream,
        "PlanStream",
        "self._upload(graph_inputs(batch, self._plan.input_names, captured.sizes))",
        "self._upload(graph_inputs(batch, self._plan.input_names))",
        contracts.recorded_steps,
    ),
    Mutation(
        "a step is recorded that has not run before",
        device_stream,
        "PlanStream",
        "        self._answers(context, batch, sizes)  # first run uncaptured",
        "        self._bind(context, graph_inputs(batch, self._plan.input_names, sizes), "
        "_layout({name: array.shape for name, array in "
        "graph_inputs(batch, self._plan.input_names, sizes).items()})[0])  # ",
        contracts.recorded_steps,
    ),
    Mutation(
        "recorded steps share the context of their profile",
        device_stream,
        "PlanStream",
        "context = self._context(profile, resources)",
        "context = self._contexts[profile.index]",
        contracts.recorded_steps,
    ),
    Mutation(
        "steps are allocated for anew",
        device_stream,
        "PlanStream",
        "        offsets = self._upload(inputs)\n",
        "        self._cuda.device_memory(1, ExitStack())\n        offsets = self._upload(inputs)\n",
        contracts.memory_is_allocated_once,
    ),
    Mutation(
        "contexts are kept",
        device_stream,
        "PlanStream",
        "        resources.callback(held.drop)\n",
        "",
        contracts.a_refused_step_leaves_nothing,
    ),
    Mutation(
        "recorded steps are kept",
        cuda,
        "Cuda",
        '        resources.callback(self._release, "cudaGraphExecDestroy", executable)\n',
        "",
        contracts.closing_frees_everything,
    ),
    Mutation(
        "pinned memory is kept",
        cuda,
        "Cuda",
        '        resources.callback(self._release, "cudaFreeHost", host_address)\n',
        "",
        contracts.closing_frees_everything,
    ),
    Mutation(
        "the plan is kept",
        engine,
        "TensorRTEngine",
        "            resources.callback(self._plan.close)\n",
        "",
        contracts.closing_frees_everything,
    ),
]


def use(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rigs load an engine with the class of ``mutation``, from the changed source."""
    module = mutation.module
    assert module.__file__ is not None
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(mutation.old) == 1, f"{mutation.old!r} is in the source {source.count(mutation.old)} times"
    changed = ModuleType(f"{module.__name__}_mutated")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # dataclasses look up their module
    exec(compile(source.replace(mutation.old, mutation.new), module.__file__, "exec"), vars(changed))
    user = rig_module if module is engine else engine
    monkeypatch.setattr(user, mutation.name, getattr(changed, mutation.name))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_without_the_call_the_contract_fails(mutation: Mutation, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    use(mutation, monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        mutation.contract(rig)


CONTROLS = sorted({(mutation.module.__name__, mutation.name, mutation.contract.__name__) for mutation in MUTATIONS})


@pytest.mark.parametrize(("module", "name", "contract"), CONTROLS)
def test_a_source_that_is_run_again_unchanged_keeps_the_contract(
    module: str, name: str, contract: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a contract could fail because of how the source is executed."""
    line = f"class {name}:"
    checked: Callable[[Rig], None] = getattr(contracts, contract)
    use(Mutation("", sys.modules[module], name, line, line, checked), monkeypatch)
    checked(rig)
