"""bei beside other servers and libraries, on the same cores and the same texts, in turn.

    python -m benchmarks.peers install [ENVIRONMENT ...]
    python -m benchmarks.peers [--model minilm] [--peers "bei BF16" ...] [--cells single-64 ...] [--repetitions 5]
                               [--tei PATH]
    python -m benchmarks.peers report [--html FILE]

``install`` makes an environment a peer (peers.toml). The measurement runs every peer that is installed, all at once
and one at a time at work, and writes results/peers-MODEL.json; cells that were not asked for are kept from an earlier
run of the same commit and peers on such a machine. Servers are driven by the benchmarks' own client over HTTP,
libraries are called in processes of their own. ``report`` writes docs/comparison.md, and a page with bars.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bei.engine.openvino import cpu_capabilities
from benchmarks.harness.arguments import parsed
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.record import kept, write
from benchmarks.harness.servers import ROOT, revision
from benchmarks.harness.texts import PASSAGES, read_prose
from benchmarks.peers import report
from benchmarks.peers.cells import CELLS, beside_bulk, in_turn, measure
from benchmarks.peers.data import Model, Peer, cache_folder, table
from benchmarks.peers.install import install, installed
from benchmarks.peers.quality import compared, scifact
from benchmarks.peers.sides import Given, PeerFailedError, Side, started

_MORE = ("beside-bulk", "quality", "memory", "cold-start", "scifact")


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["install"]:
        return install(arguments[1:])
    if arguments[:1] == ["report"]:
        return report.main(arguments[1:])
    options = parsed(
        __doc__,
        arguments,
        model=tuple(table().models),
        peers=list(table().peers),
        cells=[*CELLS, *_MORE],
        repetitions=5,
        tei=Path,
    )
    if unknown := set(options.peers) - set(table().peers) | set(options.cells) - {*CELLS, *_MORE}:
        raise SystemExit(f"neither a peer nor a cell: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))
    return 0


def run(options: Namespace, scratch: Path) -> None:
    model, prose = table().models[options.model], read_prose()
    binaries = {} if options.tei is None else {"tei": options.tei}
    peers, absent = chosen(model, options.peers, binaries)
    # Now: the checkout may have another commit when the measurement has ended.
    records = {each: installed(table().environments[each]) or {} for each in _environments(peers.values())}
    commit = revision(ROOT)
    folder = checkpoint_folder(model.checkpoint, scratch)
    calibration = prose.take(300, PASSAGES)
    given = {}
    for name, peer in peers.items():
        served = _artifact(model, folder, peer) if peer.software == "bei" else folder
        given[name] = Given(model, served, scratch, calibration, binaries)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        sides: list[Side] = []
        for name, peer in peers.items():
            try:
                side, seconds = stack.enter_context(started(peer, given[name]))
            except PeerFailedError as error:
                absent[name] = str(error).strip().splitlines()[-1]  # of a traceback the error, and no path of a machine
                print(f"{name}: does not run: {absent[name]}", flush=True)
                continue
            print(f"{name}: first answer after {seconds:.1f} s", flush=True)
            sides.append(side)
        for cell in (CELLS[name] for name in options.cells if name in CELLS):
            if (cell.documents > 0) == (model.task == "rerank"):
                results[cell.name] = _said(cell.name, measure(cell, sides, prose, options.repetitions))
                _write(model, sides, absent, results, records, commit)
        if "quality" in options.cells:
            results["quality"] = compared(model, sides, prose)
        if "memory" in options.cells:
            results["memory"] = {side.peer.name: side.memory_mb() for side in sides}
        _write(model, sides, absent, results, records, commit)
        if "beside-bulk" in options.cells and model.task == "embed":
            results["beside-bulk"] = _said("beside-bulk", beside_bulk(sides, prose, options.repetitions))
        _write(model, sides, absent, results, records, commit)
        if "scifact" in options.cells and model.task == "embed" and not model.random:
            results["scifact"] = scifact(sides)
    if "cold-start" in options.cells:

        def seconds_of(name: str) -> float:
            with started(peers[name], given[name]) as (_, seconds):
                return seconds

        names = [side.peer.name for side in sides]
        results["cold-start"] = in_turn(names, options.repetitions, seconds_of)
    _write(model, sides, absent, results, records, commit)


def chosen(model: Model, names: Sequence[str], binaries: Mapping[str, Path]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can run, and why others cannot."""
    peers, absent = dict[str, Peer](), dict[str, str]()
    for peer in (table().peers[name] for name in names):
        environment = table().environments.get(peer.environment)
        if model.task not in peer.tasks or model.pooling not in peer.settings.get("poolings", [model.pooling]):
            absent[peer.name] = f"not for {model.name}"
        elif peer.precision == "bf16" and "BF16" not in cpu_capabilities():
            # PyTorch would emulate it, OpenVINO would compute in FP32 under that name.
            absent[peer.name] = "this CPU does not compute in BF16"
        elif environment is None and peer.software not in binaries:
            absent[peer.name] = "no binary was given"
        elif environment is not None and environment.checkout and installed(environment) is None:
            raise SystemExit(f"{peer.name} is not installed of this commit: python -m benchmarks.peers install bei")
        elif environment is not None and installed(environment) is None:
            absent[peer.name] = "not installed"
        else:
            peers[peer.name] = peer
    return peers, absent


def _artifact(model: Model, folder: Path, peer: Peer) -> Path:
    """bei's, kept for each commit."""
    out = cache_folder() / "artifacts" / revision(ROOT).rstrip("+")
    out.mkdir(parents=True, exist_ok=True)
    artifact = out / f"{model.name}-{peer.precision}"
    if not (artifact / "manifest.json").is_file():
        built(folder, out, model.name, peer.precision, max_seq_len=model.max_tokens, allow_below_threshold=True)
    return artifact


def _said(name: str, found: dict[str, Any]) -> dict[str, Any]:
    print(f"{datetime.now(timezone.utc):%H:%M:%S} {name}", flush=True)
    for peer, row in found.items():
        figure = (
            f"{row['per_s']['median']:,.1f} a second" if "per_s" in row else f"P99 {row['beside_ms']['p99']:,.0f} ms"
        )
        print(f"  {peer}: {figure}; others used {max(row['foreign_load']):.1%}", flush=True)
    return found


def _environments(peers: Iterable[Peer]) -> list[str]:
    return sorted({peer.environment for peer in peers} - {""})


def _write(
    model: Model,
    sides: Sequence[Side],
    absent: Mapping[str, str],
    results: Mapping[str, Any],
    records: Mapping[str, Mapping[str, Any]],
    commit: str,
) -> None:
    name = f"peers-{model.name}"
    here = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": commit,
        "load average at the end": os.getloadavg()[0],
        "peers": [side.peer.name for side in sides],
        "not run": dict(absent),
        "install": {
            each: {"megabytes": records[each]["megabytes"], "versions": records[each]["versions"]}
            for each in _environments(side.peer for side in sides)
        },
    }
    earlier = kept(name)
    is_of_these = all(earlier.get(key) == here[key] for key in ("peers", "commit"))
    cells = {**earlier["cells"], **results} if is_of_these else dict(results)
    write(name, {**here, "cells": cells})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
