"""``bei.Model`` against the engine alone, on prose it has not met: its rate, and its memory over a long list.

    python -m benchmarks.in_process [--texts 100000] [--length passages|short] [--forms list stream] [--repetitions 5]

In each repetition the same texts are run up to three times: by the engine alone, tokenized beforehand and cut into the
batches that the server's policy would cut from all of them at once (as in ``closed_loop``); by one call of
``Model.embed``; by ``Model.embed_iter``, which reads them from a file. Each Model is in a new process, so that it meets
every word anew, and warm in the shapes of its steps. RSS of that process is sampled every half second. The warm-up
before the first repetition takes 2,048 texts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Engine, PackedBatch
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.tokenizer.encoder import TextEncoder
from benchmarks.common import alternate, ratio, sorted_batches, write
from benchmarks.engine_alone import engine_rate
from benchmarks.models import built, minilm_folder
from benchmarks.plots import BLUE, GREEN, panels, save
from benchmarks.prose import PASSAGES, SHORT, read_prose
from benchmarks.server import ROOT, Samples, environment, revision, sampling, tied

ENGINE, LIST, STREAM = "engine alone", "Model.embed", "Model.embed_iter"
# By what the worker calls them.
_FORMS = {"list": LIST, "stream": STREAM}
_LENGTHS = {"passages": PASSAGES, "short": SHORT}
_WARM_TEXTS = 2048
# Of a call's time: until then it fills what it may have under way, and learns most words.
_WARM_SHARE = 0.1
_KEPT_SAMPLES = 40


def main() -> None:
    """Measure and write ``results/in-process-<length>.json`` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--length", choices=_LENGTHS, default="passages")
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=list(_FORMS), help="how a Model gets the texts")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        engine.warmup()
        rounds = Rounds(artifact, engine, Path(scratch), options.texts, options.length)
        sides: dict[str, Callable[[], float]] = {ENGINE: rounds.engine_alone}
        sides |= {_FORMS[form]: partial(rounds.model, form) for form in options.forms}
        texts_per_s = alternate(sides, options.repetitions, rounds.prepare)
    name = f"in-process-{options.length}"
    write(
        name,
        {
            "of the engine alone": {name: ratio(texts_per_s, name, ENGINE) for name in sides if name != ENGINE},
            "memory, MB, of each call": {form: calls[1:] for form, calls in rounds.memory.items()},
            "texts/s": texts_per_s,
            "texts": {"a call": options.texts, "length": options.length, "laps": rounds.laps},
            "commit": revision(ROOT),
        },
    )
    plot(name, rounds.memory)


class Rounds:
    """The texts of one repetition at a time, and what is measured on them."""

    def __init__(self, artifact: Artifact, engine: Engine, scratch: Path, num_texts: int, length: str) -> None:
        self._encoder = TextEncoder(artifact.path / TOKENIZER, artifact.manifest.max_seq_len)
        self._artifact = artifact
        self._engine = engine
        self._costs = measure_costs(engine, vocab_size=artifact.manifest.spec.vocab_size)
        self._home = scratch / "home"
        self._home.mkdir()
        self._file = scratch / "texts.jsonl"
        self._prose = read_prose(repeats=True)
        self._length = _LENGTHS[length]
        self._all_texts = num_texts
        self._num_texts = 0
        self._batches: list[PackedBatch] = []
        self.memory: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @property
    def laps(self) -> int:
        """How often the prose was begun: Models that are new know no word of an earlier lap."""
        return self._prose.lap + 1

    def prepare(self) -> None:
        """Texts for the next repetition; few for the warm-up."""
        self._num_texts = self._all_texts if self._num_texts else min(_WARM_TEXTS, self._all_texts)
        texts = self._prose.take(self._num_texts, self._length)
        with self._file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts)
        self._batches = sorted_batches(self._encoder.encode(texts), self._engine.info.limits, self._costs)

    def engine_alone(self) -> float:
        """Texts a second."""
        return engine_rate(self._engine, self._batches, self._num_texts)

    def model(self, form: str) -> float:
        """Texts a second of a Model in a new process, which gets them in this form."""
        command = [sys.executable, "-m", "benchmarks.in_process_worker", self._artifact.path, self._file, form]
        env = environment(ROOT, self._home, {})
        process = subprocess.Popen(tied(command), stdout=subprocess.PIPE, cwd=ROOT, env=env)
        with sampling(process.pid) as samples:
            output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"the process of {_FORMS[form]} ended with {process.returncode}")
        call = json.loads(output)
        assert call["count"] == self._num_texts
        self.memory[_FORMS[form]].append(_memory(samples, call))
        return self._num_texts / float(call["ended_s"] - call["began_s"])


def _memory(samples: Samples, call: dict[str, Any]) -> dict[str, Any]:
    """RSS during a call: once it is warm, at its end, and by how much it grew beside its result."""
    began_s, elapsed_s = call["began_s"], call["ended_s"] - call["began_s"]
    during = [
        (time_s - began_s, rss_mb)
        for time_s, rss_mb in zip(samples.times_s, samples.rss_mb, strict=True)
        if began_s <= time_s <= call["ended_s"]
    ]
    if not during:  # a call that was shorter than the time between two samples
        return {}
    warm_s, warm_mb = next((sample for sample in during if sample[0] >= _WARM_SHARE * elapsed_s), during[-1])
    result_mb = call["result_bytes"] / 1e6
    step = max(1, len(during) // _KEPT_SAMPLES)
    return {
        "warm": warm_mb,
        "end": during[-1][1],
        "most": max(rss_mb for _, rss_mb in during),
        "result": round(result_mb, 1),
        "grown beside the result": round(during[-1][1] - warm_mb - result_mb * (1 - warm_s / elapsed_s), 1),
        "s, MB": [(round(time_s, 1), rss_mb) for time_s, rss_mb in during[::step]],
    }


def plot(name: str, memory: dict[str, list[dict[str, Any]]]) -> None:
    """Write ``results/<name>.png``: memory over the last call of each form, and without what it has of its result."""
    figure, ((axes,),) = panels(1, 1, (6.0, 3.4))
    for (form, calls), color in zip(memory.items(), (BLUE, GREEN), strict=False):
        if calls[-1]:
            times, rss = zip(*calls[-1]["s, MB"], strict=True)
            result = calls[-1]["result"] * np.array(times) / times[-1]
            axes.plot(times, rss, color=color, label=form)
            axes.plot(times, rss - result, color=color, linestyle="--", label="without its result")
    axes.set(title="resident memory, MB", xlabel="seconds of the call")
    axes.set_ylim(0)
    axes.legend(loc="lower right")
    save(figure, name)


if __name__ == "__main__":
    main()
