"""The report as text: sentences first, then tables; without colours unless it is printed to a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from bei.cli.doctor.facts import Cpu, Extra, InstalledPackage, LibraryFacts, Nvidia, System
from bei.cli.doctor.report import MachineReport
from bei.cli.doctor.targets import AttentionLayer, TargetFacts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Precisions with equal answers, form, verdict of each head size.
_Row: TypeAlias = "tuple[str, str, tuple[str, ...]]"

_COLORS = {"yes": "green", "no": "red", "unknown": "yellow"}
_FILE_WIDTH = 80


def as_text(report: MachineReport, width: int = _FILE_WIDTH) -> str:
    """Without colours, for a file or a pipe."""
    from rich.console import Console

    stream = io.StringIO()
    show(report, Console(file=stream, width=width, highlight=False, markup=False, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def show(report: MachineReport, console: Console) -> None:
    """Print to ``console``."""
    for line in report.summary:
        console.print(line, style="bold", markup=False, highlight=False)
    _section(console, "Machine", _pairs(_machine_rows(report.system, report.cpu)))
    folded = report.without_hardware
    if not folded:
        _section(console, "NVIDIA", _pairs(_nvidia_rows(report.nvidia, report.libraries)))
    _section(console, "Packages", _pairs(_package_rows(report.packages, report.extras)))
    targets = [target for target in report.targets if target not in folded]
    _section(console, "Targets", _pairs(_target_rows(targets)))
    for title, table, remarks in _attention_tables(report.attention):
        _section(console, title, table)
        for remark in remarks:
            console.print(f"  {remark}", markup=False, highlight=False)
    _list(console, "Not known", report.unknown)
    _list(console, "What to do", report.to_do)


def _section(console: Console, title: str, content: Table) -> None:
    console.print()
    console.print(title, style="bold underline", markup=False, highlight=False)
    console.print(content)


def _list(console: Console, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        _section(console, title, _pairs([("-", sentence) for sentence in sentences]))


def _table(*headers: str) -> Table:
    from rich.table import Table

    return Table(*headers, box=None, show_header=bool(headers), pad_edge=False, padding=(0, 2, 0, 0))


def _pairs(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Two columns. Values are not parsed as markup, as ``bei[cpu]`` would vanish."""
    from rich.text import Text

    table = _table()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", Text(value) if isinstance(value, str) else value)
    return table


def _machine_rows(system: System, cpu: Cpu) -> Iterator[tuple[str, str]]:
    yield "bei", f"{system.bei}, Python {system.python}"
    yield "system", f"{system.system}, {system.glibc}"
    yield "CPU", f"{cpu.model or 'not known'} ({cpu.architecture}), {cpu.usable_cores} usable cores"
    if cpu.instruction_sets is not None:
        there = [name for name, is_there in cpu.instruction_sets.items() if is_there]
        missing = [name for name, is_there in cpu.instruction_sets.items() if not is_there]
        yield (
            "instruction sets",
            ", ".join(there or ["none that matter"]) + (f"; not {', '.join(missing)}" if missing else ""),
        )
    if cpu.computes_in is not None:
        yield "OpenVINO computes in", ", ".join(cpu.computes_in)
    limit = f"; container limited to {_size(cpu.container_limit_bytes)}" if cpu.container_limit_bytes else ""
    yield "memory", f"{_size(cpu.memory_bytes)}, {_size(cpu.available_bytes)} available{limit}"
    if system.open_files is not None:
        soft, hard = ("unlimited" if limit < 0 else str(limit) for limit in system.open_files)
        yield "open files", f"{soft}, which bei serve raises to {hard}" if soft != hard else hard
    if system.cache_dir is not None:
        state = "can be written" if system.cache_writable else "CANNOT BE WRITTEN"
        yield "cache", f"{system.cache_dir}, {state}, {_size(system.cache_free_bytes)} free"


def _nvidia_rows(nvidia: Nvidia, libraries: Sequence[LibraryFacts]) -> Iterator[tuple[str, str]]:
    cuda = f", serves CUDA up to {_cuda(nvidia.driver_cuda)}" if nvidia.driver_cuda else ""
    yield "driver", f"{nvidia.driver or ('of unknown version' if cuda else 'none')}{cuda}"
    for gpu in nvidia.gpus:
        free = f", {_size(gpu.free_bytes)} free" if gpu.free_bytes is not None else ""
        capability = f"compute capability {_capability(gpu.capability)}"
        yield f"GPU {gpu.index}", f"{gpu.name}, {capability}, {_size(gpu.memory_bytes)}{free}"
    if not nvidia.gpus:
        yield "GPU", f"none ({nvidia.problem})" if nvidia.problem else "none"
    for library in libraries:
        yield library.title, f"{library.version}, loaded" if not library.problem else library.problem


def _package_rows(packages: Sequence[InstalledPackage], extras: Sequence[Extra]) -> Iterator[tuple[str, str]]:
    """What is there in a line each, then a line for each that is missing."""
    if there := [f"{one.name} {one.version}" for one in packages if one.version]:
        yield "installed", ", ".join(there)
    for one in packages:
        if not one.version:
            yield "not installed", f"{one.name} ({one.purpose})"
    if names := [one.name for one in extras if one.is_installed]:
        yield "extras", ", ".join(names)
    for extra in extras:
        if not extra.is_installed:
            yield "without extra", f"{extra.name} ({extra.purpose}): pip install 'bei[{extra.name}]'"


def _target_rows(targets: Sequence[TargetFacts]) -> Iterator[tuple[str, str | Text]]:
    """For each target a line of verdicts, then reasons, each once. What to do stands at the end of the report."""
    for target in targets:
        yield target.name, _verdict_line(target)
        reasons: dict[str, list[str]] = {}
        for what, answer in (("build", target.can_build), ("serve", target.can_serve)):
            if answer.reason:  # of both, where they differ in their first words only
                said = answer.reason.removeprefix("Building ").removeprefix("Serving ")
                reasons.setdefault(said.removeprefix(f"for the target {target.name} "), []).append(what)
        if target.cannot_run and not any(target.cannot_run in reason for reason in reasons):
            reasons[target.cannot_run] = ["run"]
        for reason, whats in reasons.items():
            yield "", f"{', '.join(whats)}: {reason}"


def _verdict_line(target: TargetFacts) -> Text:
    from rich.text import Text

    line = Text()
    for what, answer in (("build", target.can_build), ("serve", target.can_serve)):
        line.append(f"{what} ").append(answer.verdict, style=_COLORS[answer.verdict]).append(", ")
    line.right_crop(2)
    if target.precisions:
        names = [f"{name} (auto)" if name == target.auto else name for name in target.precisions]
        line.append(f"; {', '.join(names)}")
    return line


def _attention_tables(layers: Sequence[AttentionLayer]) -> Iterator[tuple[str, Table, list[str]]]:
    """A table for each set of equal answers, which capabilities share; within it precisions share rows."""
    matrices: dict[tuple[str, tuple[_Row, ...]], list[int | None]] = {}
    for target, capability in dict.fromkeys((layer.target, layer.capability) for layer in layers):
        matrix = _matrix(layer for layer in layers if (layer.target, layer.capability) == (target, capability))
        matrices.setdefault((target, tuple(matrix)), []).append(capability)
    for (target, rows), capabilities in matrices.items():
        of_it = [layer for layer in layers if layer.target == target and layer.capability in capabilities]
        where = ", ".join("this GPU" if one is None else _capability(one) for one in capabilities)
        kind = "" if None in capabilities else "compute capability "
        reasons = dict.fromkeys(f"{layer.fused}: {layer.reason}" for layer in of_it if layer.reason)
        seconds = sum(layer.seconds for layer in of_it)
        remarks = [*reasons, f"{len(of_it)} layers tried in {seconds:.1f} s"]
        sizes = list(dict.fromkeys(layer.head_size for layer in of_it))
        yield f"Fused attention, {target}, {kind}{where}", _matrix_table(rows, sizes), remarks


def _matrix(layers: Iterable[AttentionLayer]) -> list[_Row]:
    """Precisions with equal answers in all forms share their rows."""
    by_precision: dict[str, dict[str, list[str]]] = {}
    for layer in layers:
        by_precision.setdefault(layer.precision, {}).setdefault(layer.form, []).append(layer.fused)
    groups: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for precision, forms in by_precision.items():
        key = tuple((form, tuple(verdicts)) for form, verdicts in forms.items())
        groups.setdefault(key, []).append(precision)
    return [(", ".join(precisions), form, verdicts) for key, precisions in groups.items() for form, verdicts in key]


def _matrix_table(rows: Sequence[_Row], sizes: Sequence[int]) -> Table:
    from rich.text import Text

    table = _table("  precision", "form", *(f"{size}" for size in sizes))
    shown = ""
    for precisions, form, verdicts in rows:
        cells = [Text(verdict, style=_COLORS[verdict]) for verdict in verdicts]
        table.add_row("" if precisions == shown else f"  {precisions}", form, *cells)
        shown = precisions
    return table


def _capability(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _size(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f} GiB"
