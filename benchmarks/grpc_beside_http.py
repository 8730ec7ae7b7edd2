"""gRPC beside HTTP on one server: texts a second in requests of 32 and of single texts, and one text's time.

    python -m benchmarks.grpc_beside_http [--repetitions 11] [--scale 0.5] [--standin] [--dry]

Both ports of one server of MiniLM get prose that it has not met, as much and as long: ``/v1/embeddings`` with vectors
as lists of numbers and in base64, the Open Inference Protocol's ModelInfer, and text-embeddings-inference's Embed,
which takes single texts only. Single texts at concurrency 64, requests of 32 passages at 4, one client's single texts,
of whose times each repetition has the median. The client is a lean one on both sides (``harness/grpc_channel.py``): its
time is not gRPC's. ``--standin``: over an engine whose steps take a millisecond and no processor, in JSON of its own:
what the server's own code takes. ``--dry`` asks little and writes nothing: does it run?
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bei.server.grpc.messages import message
from benchmarks.harness.arguments import parsed
from benchmarks.harness.load import EMBEDDINGS, closed_loop, embeddings_body
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.servers import NOW, ROOT, Fleet, Kind, UnseenTexts, free_port, serving
from benchmarks.harness.texts import PASSAGES, SHORT, Words, groups, read_prose
from benchmarks.http_workers import artifact_of_standin, standin_text

INFER = "/inference.GRPCInferenceService/ModelInfer"
EMBED = "/tei.v1.Embed/Embed"


class Cell(NamedTuple):
    """Texts in all, in a request, and requests at once. ``is_time``: the median of a request's is the figure."""

    num_texts: int
    size: int
    concurrency: int
    length: Words
    is_time: bool = False


CELLS = {
    "requests of 32": Cell(1024, 32, 4, PASSAGES),
    "single texts at 64": Cell(1536, 1, 64, SHORT),
    "one text": Cell(384, 1, 1, SHORT, is_time=True),
}
JSON, BASE64, INFERRED, EMBEDDED = "JSON", "JSON, base64", "gRPC, ModelInfer", "gRPC, TEI's Embed"
SIDES = {JSON: EMBEDDINGS, BASE64: EMBEDDINGS, INFERRED: INFER, EMBEDDED: EMBED}
OVER_GRPC = (INFERRED, EMBEDDED)

Take = Callable[[int, Words], list[str]]


class Ports(NamedTuple):
    http: int
    grpc: int


def main() -> None:
    options = parsed(__doc__, repetitions=11, scale=1.0, standin=False, dry=False)
    scale, repetitions = (0.05, 1) if options.dry else (options.scale, options.repetitions)
    with (
        tempfile.TemporaryDirectory() as folder,
        (_standin if options.standin else _minilm)(Path(folder)) as (
            model,
            ports,
            take,
        ),
    ):
        found = alternate(_measurements(model, ports, take, scale), repetitions)
    results = {"gRPC / JSON": _ratios(found), "texts/s": found}
    if options.dry:
        print(json.dumps(results["gRPC / JSON"], indent=2))
    else:
        write("grpc-standin" if options.standin else "grpc", results)


@contextmanager
def _minilm(scratch: Path) -> Iterator[tuple[str, Callable[[], Ports], Take]]:
    artifact, port = built(minilm_folder(), scratch), free_port()
    served = Kind([artifact.path], (f"--grpc-port={port}",))
    with Fleet({NOW: served}, scratch / "home") as fleet:
        texts = UnseenTexts(read_prose(), fleet)
        yield artifact.manifest.name, lambda: Ports(fleet[NOW].port, port), lambda n, words: texts.take((n, words))[0]


@contextmanager
def _standin(scratch: Path) -> Iterator[tuple[str, Callable[[], Ports], Take]]:
    artifact, port, number = artifact_of_standin(ROOT, scratch / "models"), free_port(), 0
    home = scratch / "home"
    home.mkdir()

    def take(count: int, words: Words) -> list[str]:
        nonlocal number
        number += count
        return [standin_text(index) for index in range(number - count, number)]

    flags = (f"--grpc-port={port}",)
    with serving(artifact, *flags, home=home, program="benchmarks.standin") as server:
        yield artifact.name, lambda: Ports(server.port, port), take


def _measurements(
    model: str, ports: Callable[[], Ports], take: Take, scale: float
) -> Mapping[str, Callable[[], float]]:
    """A side of a cell each; rates, of one text too."""

    def measured(side: str, cell: Cell) -> float:
        count = max(1, round(cell.num_texts * scale / cell.size)) * cell.size
        bodies = [_body(side, model, group) for group in groups(take(count, cell.length), cell.size)]
        grpc_port = ports().grpc if side in OVER_GRPC else None
        done = closed_loop(ports().http, cell.concurrency, bodies, SIDES[side], grpc_port=grpc_port)
        return float(1 / np.median(done.latencies_s) if cell.is_time else count / done.elapsed_s)

    return {
        f"{side}, {name}": partial(measured, side, cell)
        for name, cell in CELLS.items()
        for side in SIDES
        if cell.size == 1 or side != EMBEDDED
    }


def _body(side: str, model: str, texts: Sequence[str]) -> str | bytes:
    if side == EMBEDDED:
        return bytes(message("tei.v1.EmbedRequest")(inputs=texts[0], truncate=True).SerializeToString())
    if side == INFERRED:
        return infer_message(model, texts)
    body = embeddings_body(texts if len(texts) > 1 else texts[0], model)
    return body if side == BASE64 else body.replace('"encoding_format": "base64"', '"encoding_format": "float"')


def infer_message(model: str, texts: Sequence[str]) -> bytes:
    """A ModelInferRequest."""
    request = message("inference.ModelInferRequest")(model_name=model)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    return bytes(request.SerializeToString())


def _ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Above 1, gRPC is the faster one."""
    return {
        cell: {
            f"{side} / {other}": ratio(found, f"{side}, {cell}", f"{other}, {cell}")
            for side in OVER_GRPC
            if f"{side}, {cell}" in found
            for other in (JSON, BASE64)
        }
        for cell in CELLS
    }


if __name__ == "__main__":
    main()
