"""Schedulers on simulated devices: bulk throughput against the P99 of single queries, at rising load.

    python -m benchmarks.simulator [--costs l4-bge-large] [--devices 1 8 64] [--loads 0.3 0.5 ...]

For each number of devices and each load: Poisson arrivals of single queries (a tenth of the load) and of requests of
256 passages, the same trace for every policy; then a backfill, whose bulk requests come in a closed loop. Nothing of
this is measured on a GPU: the tables of costs are assumptions from published figures (docs/simulation.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from bei.cli.simulate.devices import TABLES, CostTable, SimulatedDevices, read_table
from bei.cli.simulate.policies import POLICIES
from bei.cli.simulate.result import SimulationResult
from bei.cli.simulate.simulator import simulate
from bei.cli.simulate.workloads import WORKLOADS, TrafficMix
from bei.scheduler.scheduler import SchedulingRules
from benchmarks.common import write
from benchmarks.plots import BLUE, GREY, ORANGE, panels, save

_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
# Seconds of a trace by devices: more devices do more in a second.
_SECONDS = {1: 40.0, 8: 12.0, 64: 3.0}
_WARM_PART = 0.2
_LABELS = {
    "bei": ("bei", BLUE),
    "fifo": ("FIFO, token budget (as TEI)", ORANGE),
    "fixed": ("fixed batches of 32 (as Infinity)", GREY),
}


def main() -> None:
    """Simulate, and write ``results/simulator.json`` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", default="l4-bge-large", help=f"{', '.join(TABLES)}, or a file")
    parser.add_argument("--devices", nargs="+", type=int, default=list(_SECONDS))
    parser.add_argument("--loads", nargs="+", type=float, default=list(_LOADS))
    parser.add_argument("--seconds", type=float, help="of each trace (default: by devices)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table = read_table(options.costs)
    rows: list[dict[str, Any]] = []
    for devices in options.devices:
        fleet = SimulatedDevices(table, devices)
        seconds = options.seconds or _SECONDS.get(devices, 20.0)
        for load in options.loads:
            rows += compared(fleet, "poisson", TrafficMix(seconds=seconds, load=load, seed=options.seed))
        rows += compared(
            fleet, "backfill", TrafficMix(seconds=seconds, concurrency=4 * fleet.num_streams, seed=options.seed)
        )
    about = {"costs": table.name, "source": table.source, "assumed": table.is_assumed, "seed": options.seed}
    write("simulator", {**about, "at_equal_bulk_throughput": ratios(rows), "runs": rows})
    plot(rows, table, options.devices)


def compared(fleet: SimulatedDevices, name: str, mix: TrafficMix) -> list[dict[str, Any]]:
    """One trace under every policy, a row each."""
    trace = WORKLOADS[name](fleet, mix)
    rows = []
    for policy, make in POLICIES.items():
        scheduler = make(fleet.table.model(), SchedulingRules())
        result = simulate(trace, fleet, scheduler, warm_s=_WARM_PART * mix.seconds)
        rows.append(_row(fleet, name, mix, policy, result))
        interactive, bulk = result.lanes["interactive"], result.lanes["bulk"]
        print(
            f"{fleet.num_devices:3} devices, {name} {mix.load if name != 'backfill' else '':4} {policy:6}"
            f" interactive P99 {interactive.p99_ms or 0:9,.1f} ms, bulk {bulk.tokens_per_s:12,.0f} tokens/s",
            flush=True,
        )
    return rows


def _row(fleet: SimulatedDevices, name: str, mix: TrafficMix, policy: str, result: SimulationResult) -> dict[str, Any]:
    load = None if name == "backfill" else mix.load
    found: dict[str, Any] = _rounded(msgspec.to_builtins(result))
    return {"devices": fleet.num_devices, "trace": name, "load": load, "policy": policy, **found}


def _rounded(value: Any) -> Any:
    """Four digits are more than a simulation says."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """bei's interactive P99 and bulk throughput over those of each peer, on each trace."""
    by_trace: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_trace.setdefault((row["devices"], row["trace"], row["load"]), {})[row["policy"]] = row["lanes"]
    found = []
    for (devices, trace, load), lanes in by_trace.items():
        for peer in (name for name in lanes if name != "bei"):
            ours, theirs = lanes["bei"], lanes[peer]
            latency = ours["interactive"]["p99_ms"] / theirs["interactive"]["p99_ms"]
            rate = ours["bulk"]["tokens_per_s"] / theirs["bulk"]["tokens_per_s"]
            about = {"devices": devices, "trace": trace, "load": load, "peer": peer}
            found.append({**about, "interactive_p99": round(latency, 3), "bulk_tokens_per_s": round(rate, 3)})
    return found


def plot(rows: Sequence[dict[str, Any]], costs: CostTable, devices: Sequence[int]) -> None:
    """Write ``results/simulator.png``: a panel for each number of devices."""
    figure, axes = panels(1, len(devices), (4.2 * len(devices), 3.8))
    for each, count in zip(axes[0], devices, strict=True):
        for policy, (label, color) in _LABELS.items():
            mine = [row for row in rows if (row["devices"], row["policy"]) == (count, policy)]
            open_loop = [_point(row) for row in mine if row["trace"] == "poisson"]
            each.plot(*zip(*open_loop, strict=True), "o-", color=color, markersize=3.5, label=label)
            each.plot(*zip(*[_point(row) for row in mine if row["trace"] == "backfill"], strict=True), "*", color=color)
        each.set(yscale="log", title=f"{count} device{'s' * (count > 1)}", xlabel="bulk, thousands of tokens a second")
        each.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        each.grid(True, which="both", color="#e6e6e6", linewidth=0.7)
        each.set_ylim(bottom=1)
        each.set_xlim(left=0)
    axes[0][0].set_ylabel("interactive P99, ms")
    axes[0][0].legend(loc="lower left")
    kind = "assumed" if costs.is_assumed else "measured"
    note = f"Simulated; costs {kind}: {costs.name}. Lines: Poisson arrivals, rising load. Stars: a closed loop."
    figure.suptitle(note, fontsize=9, x=0.01, ha="left")
    save(figure, "simulator")


def _point(row: dict[str, Any]) -> tuple[float, float]:
    return row["lanes"]["bulk"]["tokens_per_s"] / 1e3, row["lanes"]["interactive"]["p99_ms"]


if __name__ == "__main__":
    main()
