"""``bei simulate``: flags, traces, and the run of each policy."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bei.cli.simulate.devices import TABLES, SimulatedDevices, read_table
from bei.cli.simulate.http_time import HttpTime
from bei.cli.simulate.page import simulation_page
from bei.cli.simulate.policies import POLICIES
from bei.cli.simulate.report import PolicyComparison, table
from bei.cli.simulate.simulator import simulate
from bei.cli.simulate.trace import Trace, read_trace, write_trace
from bei.cli.simulate.workloads import WORKLOADS, TrafficMix
from bei.errors import ConfigError
from bei.scheduler.scheduler import SchedulingRules
from bei.utils.full_disk import write_whole
from bei.utils.ranges import Range, shown, whole

_DEFAULT_COSTS = "l4-bge-large"
_REQUESTS_A_STREAM = 4  # of a backfill, in flight at a time
_WARM_PART = 0.1

# Flags that describe a synthetic trace.
_MIX_FLAGS = ("load", "interactive_share", "bulk_texts", "seed")
# Flags of bei's policy only.
_RULE_FLAGS = ("step_cap_ms", "bulk_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Missing ones are None, so that flags without effect can be refused."""
    count, share = whole(1, 1_000_000), _number(Range(0, 1))
    seconds = _number(Range(0, 86_400, "seconds"))

    def add(flag: str, kind: Callable[[str], Any], metavar: str, text: str, default: Any = None) -> None:
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)

    add(
        "--costs",
        str,
        "TABLE",
        f"what steps cost: {', '.join(TABLES)} (assumed, not measured), or a file that bei tune has written "
        f"(default: {_DEFAULT_COSTS})",
        _DEFAULT_COSTS,
    )
    add("--devices", count, "N", "identical devices that take steps from one queue (default: 8)", 8)
    add("--trace", str, "TRACE", f"{', '.join(WORKLOADS)}, or a file of requests (default: backfill)", "backfill")
    add(
        "--policies",
        _policies,
        "NAMES",
        f"policies to compare, with commas (default: {','.join(POLICIES)})",
        tuple(POLICIES),
    )
    add(
        "--seconds",
        _number(Range(0, 86_400, "seconds", above=True)),
        "X",
        "length of the trace (default: 20; of a file, up to its last arrival)",
    )
    add(
        "--warm-seconds",
        seconds,
        "X",
        "seconds at the start that are not measured (default: a tenth of a synthetic trace)",
    )
    add(
        "--load",
        _number(Range(0, 1000, above=True)),
        "X",
        "share of the devices' time that all requests together need (default: 0.8)",
    )
    add(
        "--interactive-share",
        share,
        "X",
        "share of --load that is single queries; in a backfill, share of the devices' time (default: 0.1)",
    )
    add("--bulk-texts", count, "N", "texts of a bulk request (default: 256)")
    add(
        "--concurrency",
        count,
        "N",
        f"requests of a backfill that are unanswered at any time (default: {_REQUESTS_A_STREAM} a stream)",
    )
    add("--seed", whole(0, 2**63 - 1), "N", "seed of a synthetic trace (default: 0)")
    add(
        "--step-cap-ms",
        _number(Range(0, 3_600_000, "milliseconds", above=True)),
        "X",
        "as for bei serve (default: chosen from the costs)",
    )
    add("--bulk-share", _number(Range(0, 1, below=True)), "X", "as for bei serve (default: 0.2)")
    add(
        "--front-request-ms",
        _number(Range(0, 1_000_000, "milliseconds")),
        "X",
        "time of a server for a request, without the engine (default: 0)",
        0.0,
    )
    add(
        "--front-text-us",
        _number(Range(0, 1_000_000_000, "microseconds")),
        "X",
        "... and for each of its texts (default: 0)",
        0.0,
    )
    add(
        "--front-cores",
        whole(0, 4096),
        "N",
        "cores of a CPU engine that do this work too; 0: the engine has its own device",
        0,
    )
    add("--json", Path, "FILE", "write the figures to this file")
    add("--html", Path, "FILE", "write a page with a picture of the latencies to this file")
    add("--write-trace", Path, "FILE", "write the trace to this file, a JSON object a request, for --trace")


def run(options: Mapping[str, Any]) -> str:
    """Simulate, write the requested files, and return a table. Raises ConfigError, OSError."""
    devices = SimulatedDevices(read_table(options["costs"]), options["devices"])
    trace, described = _trace(options, devices)
    if options["write_trace"]:
        write_trace(options["write_trace"], trace)
    comparison = _compared(options, devices, trace, described)
    if options["json"]:
        write_whole(options["json"], msgspec.json.format(msgspec.json.encode(comparison), indent=2) + b"\n")
    if options["html"]:
        write_whole(options["html"], simulation_page(comparison).encode())
    return table(comparison)


def _compared(
    options: Mapping[str, Any], devices: SimulatedDevices, trace: Trace, described: Mapping[str, Any]
) -> PolicyComparison:
    rules = _rules(options)
    http_time = HttpTime(options["front_request_ms"] / 1e3, options["front_text_us"] / 1e6, options["front_cores"])
    results = {}
    for name in options["policies"]:
        policy = POLICIES[name](devices.table.model(), rules)
        try:
            results[name] = simulate(trace, devices, policy, http_time=http_time, warm_s=described["warm_seconds"])
        except ValueError as error:
            raise ConfigError(
                f"Nothing is measured ({error}): give fewer --warm-seconds, or a longer trace."
            ) from error
    return PolicyComparison(
        devices.table.name, devices.table.source, devices.table.is_assumed, devices.num_devices, described, results
    )


def _rules(options: Mapping[str, Any]) -> SchedulingRules:
    given = {name: options[name] for name in _RULE_FLAGS if options[name] is not None}
    if given and "bei" not in options["policies"]:
        raise ConfigError(
            f"{_flags(given)}: only the policy bei uses that, and --policies does not name it: leave it out, or name "
            "bei."
        )
    found = {"bulk_share": given["bulk_share"]} if "bulk_share" in given else {}
    return SchedulingRules(step_cap_s=given.get("step_cap_ms", 0.0) / 1e3, **found)


def _trace(options: Mapping[str, Any], devices: SimulatedDevices) -> tuple[Trace, dict[str, Any]]:
    """The trace, and its description."""
    name = options["trace"]
    trace, described = _synthetic(name, options, devices) if name in WORKLOADS else _stored(name, options)
    if options["concurrency"] is not None and not trace.backfill:
        raise ConfigError("--concurrency works with a backfill only, and the trace has none: leave it out.")
    described |= {"requests": len(trace.arrivals) + len(trace.backfill), "texts": trace.num_texts}
    return trace, described


def _synthetic(name: str, options: Mapping[str, Any], devices: SimulatedDevices) -> tuple[Trace, dict[str, Any]]:
    if name == "backfill" and options["load"] is not None:
        raise ConfigError(
            "--load has no effect on a backfill, which takes all of the devices' time: set --interactive-share instead."
        )
    given = {key: options[key] for key in (*_MIX_FLAGS, "seconds", "concurrency") if options[key] is not None}
    if name == "backfill":
        given.setdefault("concurrency", _REQUESTS_A_STREAM * devices.num_streams)
    mix = TrafficMix(**given)
    warm_s = _WARM_PART * mix.seconds if options["warm_seconds"] is None else options["warm_seconds"]
    kept = {key: value for key, value in vars(mix).items() if name == "backfill" or key != "concurrency"}
    if name == "backfill":
        del kept["load"]
    try:
        return WORKLOADS[name](devices, mix), {"name": name, **kept, "warm_seconds": warm_s}
    except ValueError as error:
        raise ConfigError(f"The trace cannot be made ({error}): give more --seconds, or more --load.") from error


def _stored(name: str, options: Mapping[str, Any]) -> tuple[Trace, dict[str, Any]]:
    given = {key: options[key] for key in _MIX_FLAGS if options[key] is not None}
    if given:
        raise ConfigError(
            f"{_flags(given)}: only synthetic traces ({', '.join(WORKLOADS)}) use that, a trace in a file does not: "
            "leave it out."
        )
    concurrency = options["concurrency"] or _REQUESTS_A_STREAM
    if not Path(name).exists() or Path(name).is_dir():
        raise ConfigError(f"{name} is no trace: give one of {', '.join(WORKLOADS)}, or a file of requests.")
    trace = read_trace(Path(name), concurrency=concurrency, seconds=options["seconds"])
    described = {"name": name, "seconds": options["seconds"], "warm_seconds": options["warm_seconds"] or 0.0}
    return trace, described | ({"concurrency": concurrency} if trace.backfill else {})


def _flags(names: Mapping[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in POLICIES]:
        raise argparse.ArgumentTypeError(f"no policy {unknown[0]!r}: choose from {', '.join(POLICIES)}, with commas")
    return names


def _number(within: Range) -> Callable[[str], float]:
    """A number ``within`` the range."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value not in within:
            raise argparse.ArgumentTypeError(f"must be a number {within}, not {shown(text)}")
        return value

    return parse
