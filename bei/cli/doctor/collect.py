"""The whole examination."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bei.cli.doctor import advice
from bei.cli.doctor.attention import HEAD_SIZES, attention_facts
from bei.cli.doctor.cpu import cpu_facts
from bei.cli.doctor.gpus import nvidia_facts
from bei.cli.doctor.guarded import Unknowns
from bei.cli.doctor.report import AttentionLayer, Report
from bei.cli.doctor.system import libraries, packages, system_facts
from bei.cli.doctor.targets import TARGETS, Builder, target_facts
from bei.errors import BeiError


def examine(
    builder: Builder | BeiError,
    *,
    target: str | None = None,
    head_sizes: tuple[int, ...] = HEAD_SIZES,
    capabilities: tuple[str, ...] = (),
    with_attention: bool = True,
    say: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> Report:
    """What this machine can do.

    ``builder``: where it cannot be had, the error that says so. ``target``: look at this one only. ``say`` hears what
    is under way. ``root``: where /proc and /sys are, for stand-ins of other machines.
    """
    unknowns = Unknowns()
    say("system, CPU, GPUs, libraries")
    system, cpu, nvidia = system_facts(unknowns), cpu_facts(root, unknowns), nvidia_facts(root, unknowns)
    installed, found = packages(), libraries()
    names = TARGETS if target is None else (target,)
    targets = [target_facts(name, builder, capabilities, nvidia, unknowns) for name in names]
    layers: list[AttentionLayer] = []
    untried = ["fused attention: not tried, as --no-attention says"]
    if with_attention:
        wanted = [library for library in found if library.target in names]
        layers, untried = attention_facts(builder, wanted, nvidia, head_sizes, capabilities, say)
    return Report(
        summary=advice.summary(targets, cpu, nvidia),
        system=system,
        cpu=cpu,
        packages=installed,
        nvidia=nvidia,
        libraries=found,
        targets=targets,
        attention=layers,
        unknown=list(dict.fromkeys([*unknowns.sentences, *untried, *advice.unknown_always()])),
        to_do=advice.to_do(targets, system, installed, nvidia, target),
    )
