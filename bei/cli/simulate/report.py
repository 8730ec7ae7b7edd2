"""Results of one trace under several policies, as the table of ``bei simulate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bei.cli.console_text import console_text
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
    """The results as text. Latencies of requests run from their arrival to their last text's answer."""
    from rich import box
    from rich.table import Table

    rows = Table(box=box.SIMPLE, pad_edge=False)
    rows.add_column("policy")
    for title in (
        *("interactive P50, ms", "P99, ms", "bulk P50, ms", "P99, ms", "bulk tokens/s", "tokens/s"),
        *("tokens a step", "slots filled", "devices busy"),
    ):
        rows.add_column(title, justify="right")
    for name, result in comparison.policies.items():
        interactive, bulk, steps = result.lanes["interactive"], result.lanes["bulk"], result.steps
        latencies = (interactive.p50_ms, interactive.p99_ms, bulk.p50_ms, bulk.p99_ms)
        rates = (bulk.tokens_per_s, result.tokens_per_s, steps.mean_tokens)
        rows.add_row(
            name,
            *("-" if value is None else f"{value:,.1f}" for value in latencies),
            *(f"{value:,.0f}" for value in rates),
            *(f"{share:.1%}" for share in (steps.fill, steps.device_use)),
        )
    kind = "assumed, not measured" if comparison.is_assumed else "measured"
    described = ", ".join(f"{name} {_shown(value)}" for name, value in comparison.trace.items() if name != "name")
    cut = max(result.cut_texts for result in comparison.policies.values())
    return console_text(
        f"costs: {comparison.costs} ({kind}). {comparison.source}",
        f"trace: {comparison.trace['name']} on {comparison.devices} devices: {described}",
        rows,
        *([f"{cut:,} texts are longer than the engine takes, and were cut"] if cut else []),
        width=132,
    )


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"
