"""An honest client beside a greedy one that calls all of its large requests interactive: what is left for the first.

    python -m benchmarks.fairness [--before CHECKOUT] [--cases key connection] [--seconds 25] [--rate 4]

The honest client sends single texts of prose, which come at ``--rate`` a second whatever the server does; their latency
counts from when they were due. Cases: ``key``: both have an API key, and the greedy one sends requests of 200 passages
on three connections; ``connection``: the server has no keys, and the greedy client sends requests of 1,024 passages on
one connection. It obeys no Retry-After: it asks again after 0.3 s. Both servers get the same texts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import LANE, Load, Stream, drive, embeddings_body, poisson
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import with_foreign_load
from benchmarks.harness.servers import Kind, kinds, revision, serving
from benchmarks.harness.summaries import latency_ms
from benchmarks.harness.texts import PASSAGES, SHORT, Prose, groups, read_prose

_GREEDY, _HONEST = "greedy-key-0123456789abcdef", "honest-key-0123456789abcdef"
_REQUESTS = 60  # of the greedy client, prepared before; more than any server answers meanwhile
_POLL_S = 0.3


@dataclass(frozen=True)
class Greedy:
    """Texts of a request, and requests at once."""

    texts: int
    concurrency: int
    has_keys: bool


CASES = {"key": Greedy(200, 3, has_keys=True), "connection": Greedy(1024, 1, has_keys=False)}


def main() -> None:
    options = parsed(__doc__, before=Path, cases=list(CASES), seconds=25.0, rate=4.0)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        keys = scratch / "keys.yaml"
        keys.write_text(f"greedy: {_GREEDY}\nhonest: {_HONEST}\n")
        artifact = built(minilm_folder(), scratch)
        sides = kinds({artifact.path: minilm_folder()}, options, scratch)
        found: dict[str, Any] = {"servers": {name: revision(kind.checkout) for name, kind in sides.items()}}
        for name in options.cases:
            flags = ("--api-keys-file", str(keys)) if CASES[name].has_keys else ()
            found[name] = {
                side: measured(kind, CASES[name], flags, options.rate, options.seconds, scratch, read_prose())
                for side, kind in sides.items()
            }
    write("fairness", {"single texts a second": options.rate, "seconds": options.seconds, **found})


def measured(
    kind: Kind, greedy: Greedy, flags: tuple[str, ...], rate: float, seconds: float, scratch: Path, prose: Prose
) -> dict[str, Any]:
    """The honest client alone on a server, and beside the greedy one."""
    arrivals = poisson(rate, seconds)
    num_requests = _REQUESTS * 200 // greedy.texts
    alone, beside = (honest_stream(prose, arrivals, greedy) for _ in range(2))
    passages = prose.take(num_requests * greedy.texts, PASSAGES)
    bodies = [embeddings_body(group) for group in groups(passages, greedy.texts)]
    flood = Stream(
        "greedy",
        bodies,
        headers=headers_of(_GREEDY, greedy) | {LANE: "interactive"},
        concurrency=greedy.concurrency,
        retry="poll",
        poll_s=_POLL_S,
    )
    with serving(kind.artifacts, *flags, checkout=kind.checkout, home=scratch) as server:
        before, _ = with_foreign_load(lambda: drive(server.port, [alone], seconds=seconds))
        both, foreign = with_foreign_load(lambda: drive(server.port, [beside, flood], seconds=seconds))
    return {"alone": honest(before), "beside": honest(both), "greedy": both["greedy"].statuses, "foreign load": foreign}


def honest_stream(prose: Prose, arrivals: list[float], greedy: Greedy) -> Stream:
    """Single texts, on connections of their own."""
    bodies = [embeddings_body(text) for text in prose.take(len(arrivals), SHORT)]
    return Stream("honest", bodies, headers=headers_of(_HONEST, greedy), arrivals_s=arrivals)


def headers_of(key: str, greedy: Greedy) -> dict[str, str]:
    """Those that carry ``key``, where the server asks for keys."""
    return {"Authorization": f"Bearer {key}"} if greedy.has_keys else {}


def honest(load: Load) -> dict[str, Any]:
    """What became of the honest client's requests."""
    outcome = load["honest"]
    return {"statuses": outcome.statuses, "ms": latency_ms(outcome.latencies_s)}


if __name__ == "__main__":
    main()
