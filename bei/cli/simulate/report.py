"""Results of one trace under several policies, as the table of ``bei simulate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bei.cli.console_text import console_text, wrapped
from bei.cli.simulate.result import SimulationResult


@dataclass(frozen=True)
class PolicyComparison:
    """The results of one trace by policy. ``trace``: its description. ``source``, ``is_assumed``: the cost table's."""

    costs: str
    source: str
    is_assumed: bool
    devices: int
    trace: Mapping[str, Any]
    policies: Mapping[str, SimulationResult]


def table(comparison: PolicyComparison) -> str:
    """The results as text: a column for each policy. Latencies of requests run from their arrival to their last text's
    answer."""
    from rich import box
    from rich.table import Table

    rows = Table(box=box.SIMPLE, pad_edge=False)
    rows.add_column("")
    for name in comparison.policies:
        rows.add_column(name, justify="right")
    for name, values in figures_of(comparison.policies).items():
        rows.add_row(name, *values)
    cut = max(result.cut_texts for result in comparison.policies.values())
    return console_text(
        wrapped(finding(comparison)),
        *(wrapped(f"{name}: {text}") for name, text in described(comparison)),
        rows,
        *([f"{cut:,} texts are longer than the engine takes, and were cut"] if cut else []),
    )


def finding(comparison: PolicyComparison) -> str:
    """The result in a sentence: the shortest P99 of single queries, and what bulk work gets with it."""
    p99 = {name: result.lanes["interactive"].p99_ms for name, result in comparison.policies.items()}
    known = {name: value for name, value in p99.items() if value is not None}
    bulk = {name: result.lanes["bulk"].tokens_per_s for name, result in comparison.policies.items()}
    if not known:
        best = max(bulk, key=lambda name: bulk[name])
        return f"{best} does the most bulk work, {bulk[best]:,.0f} tokens/s; there were no single queries."
    best = min(known, key=lambda name: known[name])
    others = ", ".join(f"{name} {_number(value)}" for name, value in known.items() if name != best)
    than = f" ({others})" if others else ""
    most = max(bulk.values())
    share = f", {bulk[best] / most:.0%} of the most" if most and len(bulk) > 1 else ""
    return (
        f"With {best} 99 of 100 single queries are answered within {_number(known[best])} ms{than}, beside "
        f"{bulk[best]:,.0f} tokens/s of bulk work{share}."
    )


def figures_of(policies: Mapping[str, SimulationResult]) -> dict[str, list[str]]:
    """The figures of each policy, by what they are."""
    rows: dict[str, list[str]] = {}
    for result in policies.values():
        interactive, bulk, steps = result.lanes["interactive"], result.lanes["bulk"], result.steps
        for name, value in (
            ("interactive P50, ms", _number(interactive.p50_ms)),
            ("interactive P99, ms", _number(interactive.p99_ms)),
            ("bulk P50, ms", _number(bulk.p50_ms)),
            ("bulk P99, ms", _number(bulk.p99_ms)),
            ("bulk tokens/s", f"{bulk.tokens_per_s:,.0f}"),
            ("tokens/s", f"{result.tokens_per_s:,.0f}"),
            ("tokens a step", f"{steps.mean_tokens:,.0f}"),
            ("slots filled", f"{steps.fill:.1%}"),
            ("devices busy", f"{steps.device_use:.1%}"),
        ):
            rows.setdefault(name, []).append(value)
    return rows


def described(comparison: PolicyComparison) -> list[tuple[str, str]]:
    """What was simulated, by name."""
    kind = "assumed, not measured" if comparison.is_assumed else "measured"
    trace = ", ".join(f"{name} {_shown(value)}" for name, value in comparison.trace.items() if name != "name")
    return [
        ("costs", f"{comparison.costs} ({kind}). {comparison.source}"),
        ("trace", f"{comparison.trace['name']} on {comparison.devices} devices: {trace}"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"
