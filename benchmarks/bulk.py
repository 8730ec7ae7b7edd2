"""``bei embed`` on MiniLM: its rate beside the engine alone, and its memory over a long job.

    python -m benchmarks.bulk [--repetitions 5] [--rows 8000] [--long-rows 200000] [--only rate memory]

Rate: passages of prose (about 78 tokens) in a Parquet file. ``bei embed`` is the command in a process of its own; its
tokens a second are those that it reports, from before the first row is read to after the last part is on the disk. The
engine alone runs the same texts, tokenized and cut into batches beforehand. Memory: that of the command over a job of
sentences (about 29 tokens); the verdict is of what follows its first quarter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bei.artifact.manifest import Artifact
from bei.scheduler.cost_measurement import measure as measure_costs
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import encoder_of, loaded, sorted_batches, texts_per_s
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import kept, write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.sampling import sampling
from benchmarks.harness.summaries import flatness
from benchmarks.harness.texts import PASSAGES, SHORT, read_prose

JOB, ENGINE = "bei embed", "engine alone"
# Smaller shards than the command would choose for so short a job: reading, tokenization, engine and writing overlap
# only from one shard to the next.
_SHARD_ROWS = 1000


def main() -> None:
    options = parsed(__doc__, repetitions=5, rows=8_000, long_rows=200_000, only=["rate", "memory"])
    results = kept("bulk")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        artifact = built(minilm_folder(), scratch)
        if "rate" in options.only:
            results["rate"] = rate(artifact, scratch, options.rows, options.repetitions)
        if "memory" in options.only:
            results["memory"] = memory(artifact, scratch, options.long_rows)
    write("bulk", results)


def rate(artifact: Artifact, scratch: Path, num_rows: int, repetitions: int) -> dict[str, Any]:
    """Tokens a second of both sides, in turn."""
    texts = read_prose().take(num_rows, PASSAGES)
    source, number = saved(texts, scratch / "passages.parquet"), count()
    with loaded(artifact) as engine:
        encodings = encoder_of(artifact).encode(texts)
        num_tokens = sum(encoding.num_tokens for encoding in encodings)
        batches = sorted_batches(encodings, engine.info.limits, measure_costs(engine))

        def job() -> float:
            output = scratch / f"passages-{next(number)}"
            with running(artifact, source, output, "--shard-rows", str(_SHARD_ROWS)) as child:
                last = [*events(child)][-1]
            assert (last["rows"], last["tokens"]) == (num_rows, num_tokens)
            return float(last["tokens_per_s"])

        rates = alternate({JOB: job, ENGINE: lambda: texts_per_s(engine, batches, num_tokens)}, repetitions)
    return {"rows": num_rows, "tokens": num_tokens, "tokens_per_s": rates, "ratio": ratio(rates, JOB, ENGINE)}


def memory(artifact: Artifact, scratch: Path, num_rows: int) -> dict[str, Any]:
    """Resident memory in MB by the seconds since the process began, and its verdict."""
    source = saved(read_prose().take(num_rows, SHORT), scratch / "sentences.parquet")
    with running(artifact, source, scratch / "sentences") as child, sampling(child.pid) as samples:
        began = time.monotonic()
        said = [(time.monotonic() - began, event) for event in events(child)]
    seconds = [round(at - began, 1) for at in samples.times_s]
    # The engine's kernels and the tokenizer's words fill caches of bounded size, most of them in the first quarter.
    verdict = flatness(seconds, samples.rss_mb, warm_s=said[len(said) // 4][0], growth=0.05, spread=0.15)
    totals = {name: said[-1][1][name] for name in ("rows", "tokens", "shards", "tokens_per_s")}
    every = max(1, len(seconds) // 300)
    return {**totals, "verdict": verdict, "seconds": seconds[::every], "RSS, MB": samples.rss_mb[::every]}


def saved(texts: Sequence[str], path: Path) -> Path:
    """A Parquet file of them, with an id each."""
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
    return path


@contextmanager
def running(artifact: Artifact, source: Path, output: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command. Raises CalledProcessError where it does not end well."""
    command = [sys.executable, "-m", "bei", "embed", str(artifact.path), "--json", "--id-column", "id"]
    command += ["--input", str(source), "--output", str(output), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        yield child
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def events(child: subprocess.Popen[bytes]) -> Iterator[Mapping[str, Any]]:
    """What it says after each shard, as it says it."""
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


if __name__ == "__main__":
    main()
