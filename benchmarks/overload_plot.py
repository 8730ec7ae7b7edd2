"""The plot of ``benchmarks.overload``: memory, latencies of what was accepted, statuses, truth of Retry-After."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, panels, plain_log, save

if TYPE_CHECKING:
    from benchmarks.overload import Overload
    from benchmarks.retry_after import Rounds

_COLORS = {"no deadline": ORANGE, "deadline": BLUE}
_MOST_POINTS = 1_500


def plot(runs: Mapping[str, Overload], rounds: Rounds) -> None:
    """Write ``results/overload.png``."""
    figure, ((memory, latency), (statuses, truth)) = panels(2, 2, (11, 6.6))
    for name, run in runs.items():
        times, rss = run.rss
        memory.plot(times, rss, color=_COLORS[name], label=name)
        _latencies(latency, run, name)
    memory.set(title="resident memory of the server, MB", xlabel="seconds since the load began")
    memory.set_ylim(0, max(float(run.rss[1].max()) for run in runs.values()) * 1.2)
    memory.legend(loc="lower right")
    latency.set(title="accepted requests: seconds from when due to the answer", xlabel="due, s", yscale="log")
    plain_log(latency.yaxis)
    latency.legend(loc="center right", markerscale=4, frameon=True, framealpha=0.85)
    last = list(runs)[-1]
    _statuses(statuses, runs[last], last)
    _truth(truth, rounds)
    save(figure, "overload")


def _latencies(axes: Any, run: Overload, name: str) -> None:
    outcome = run.load["all"]
    accepted = np.flatnonzero(outcome.status == 200)
    shown = accepted[:: max(1, len(accepted) // _MOST_POINTS)]
    waits = (outcome.done_s - outcome.due_s)[shown]
    axes.plot(outcome.due_s[shown], waits, ".", markersize=2.5, color=_COLORS[name], label=name)
    if run.deadline_ms is not None:
        axes.axhline(run.deadline_ms / 1e3, color=GREY, linestyle="--", label="the deadline")


def _statuses(axes: Any, run: Overload, name: str) -> None:
    outcome = run.load["all"]
    kinds = {
        "answered (200)": (outcome.status == 200, GREEN),
        "refused (429)": (outcome.status == 429, ORANGE),
        "expired (504)": (outcome.status == 504, PURPLE),
        "other": (~np.isin(outcome.status, (200, 429, 504)), RED),
    }
    edges = np.arange(0, run.seconds + 1)
    shown = {label: (mask, color) for label, (mask, color) in kinds.items() if mask.any()}
    counts = [np.histogram(outcome.due_s[mask], edges)[0] for mask, _ in shown.values()]
    if counts:
        axes.stackplot(edges[:-1], counts, labels=list(shown), colors=[color for _, color in shown.values()], alpha=0.8)
    axes.set(title=f"{name}: requests due in a second, by what became of them", xlabel="due, s")
    axes.legend(loc="upper right", frameon=True, framealpha=0.85)


def _truth(axes: Any, rounds: Rounds) -> None:
    axes.set(title="Retry-After, s, against the time until there was room, s", xlabel="until there was room, s")
    if not rounds.said_s:
        axes.annotate("no refusal said how long to wait", (0.5, 0.5), xycoords="axes fraction", ha="center")
        return
    axes.plot(rounds.room_s, rounds.said_s, ".", markersize=3, color=BLUE, alpha=0.6)
    limits = np.array([min(rounds.room_s + rounds.said_s) / 1.3, max(rounds.room_s + rounds.said_s) * 1.3])
    axes.plot(limits, limits, color=GREY)
    axes.fill_between(limits, limits / 1.5, limits * 1.5, color=GREY, alpha=0.2, label="within 1.5 times")
    axes.set(xscale="log", yscale="log", ylabel="Retry-After, s")
    for axis in (axes.xaxis, axes.yaxis):
        plain_log(axis)
    axes.legend(loc="upper left")
