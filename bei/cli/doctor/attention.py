"""Fused attention: which layers there is a kernel for, found by building each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bei.cli.doctor.report import AttentionLayer, LibraryFacts, Nvidia
from bei.cli.doctor.targets import ELSEWHERE, Builder
from bei.errors import BeiError

HEAD_SIZES = (32, 64, 80, 96, 128, 256)


def attention_facts(
    builder: Builder | BeiError,
    libraries: Sequence[LibraryFacts],
    nvidia: Nvidia,
    head_sizes: Sequence[int],
    capabilities: tuple[str, ...],
    say: Callable[[str], None],
) -> tuple[list[AttentionLayer], list[str]]:
    """The layers, and sentences on what was not tried and why.

    TensorRT builds for the GPU of this machine; TensorRT-RTX for ``capabilities``, else for this machine's GPU, else
    for those of ``ELSEWHERE``.
    """
    if isinstance(builder, BeiError):
        return [], [f"fused attention: {builder}"]
    layers, untried = [], []
    for library in libraries:
        if library.problem:
            untried.append(f"fused attention with {library.title}: {library.problem}")
        elif library.target == "tensorrt" and nvidia.state != "ready":
            untried.append(f"fused attention with {library.title}: it builds for the GPU of this machine only")
        else:
            layers += _layers(builder, library, _capabilities(library, nvidia, capabilities), head_sizes, say)
    return layers, untried


def _capabilities(library: LibraryFacts, nvidia: Nvidia, asked: tuple[str, ...]) -> list[int | None]:
    if library.target == "tensorrt":
        return [None]
    if not asked and nvidia.gpus:
        return [nvidia.gpus[0].capability]
    return [int(capability) for capability in asked or ELSEWHERE]


def _layers(
    builder: Builder,
    library: LibraryFacts,
    capabilities: list[int | None],
    head_sizes: Sequence[int],
    say: Callable[[str], None],
) -> list[AttentionLayer]:
    asked = [
        (capability, precision, form, head_size)
        for capability in capabilities
        for precision in builder.precisions
        for form in builder.forms
        for head_size in head_sizes
    ]
    layers: list[AttentionLayer] = []
    answers = iter(builder.probed(library.target, asked))
    for index, (capability, precision, form, head_size) in enumerate(asked, 1):
        say(f"{library.title}: attention layer {index} of {len(asked)} ({precision}, {form}, heads of {head_size})")
        answer = next(answers)
        layers.append(
            AttentionLayer(
                target=library.target,
                capability=capability,
                precision=precision,
                form=form,
                head_size=head_size,
                fused=answer.fused,
                reason=answer.reason,
                seconds=answer.seconds,
            )
        )
    return layers
