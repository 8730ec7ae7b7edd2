"""Schedulers on simulated devices: bulk throughput against the P99 of single queries, at rising load.

    python -m benchmarks.simulator [--costs l4-bge-large] [--devices 1 8 64] [--loads 0.3 0.5 ...]

For each number of devices and each load: Poisson arrivals of single queries (a tenth of the load) and of requests of
256 passages, the same trace for every policy; then a backfill, whose bulk requests come in a closed loop. Nothing of
this is measured on a GPU: the tables of costs are assumptions from published figures (docs/simulation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bei.cli.simulate.devices import SimulatedDevices, read_table
from bei.cli.simulate.policies import POLICIES
from bei.cli.simulate.simulator import simulate
from bei.cli.simulate.workloads import WORKLOADS, TrafficMix
from bei.scheduler.scheduler import SchedulingRules
from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import write

# Seconds of a trace by devices: more devices do more in a second.
_SECONDS = {1: 40.0, 8: 12.0, 64: 3.0}
_WARM_PART = 0.2


def main() -> None:
    loads = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95]
    options = parsed(__doc__, costs="l4-bge-large", devices=list(_SECONDS), loads=loads, seconds=float, seed=0)
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


def compared(fleet: SimulatedDevices, name: str, mix: TrafficMix) -> list[dict[str, Any]]:
    """One trace under every policy, a row each."""
    trace = WORKLOADS[name](fleet, mix)
    rows = []
    for policy, make in POLICIES.items():
        scheduler = make(fleet.table.model(), SchedulingRules())
        result = simulate(trace, fleet, scheduler, warm_s=_WARM_PART * mix.seconds)
        about = {"devices": fleet.num_devices, "trace": name, "load": None if name == "backfill" else mix.load}
        rows.append({**about, "policy": policy, **_rounded(msgspec.to_builtins(result))})
        interactive, bulk = result.lanes["interactive"], result.lanes["bulk"]
        figures = f"interactive P99 {interactive.p99_ms or 0:,.1f} ms, bulk {bulk.tokens_per_s:,.0f} tokens/s"
        print(*about.values(), policy, figures, flush=True)
    return rows


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


if __name__ == "__main__":
    main()
