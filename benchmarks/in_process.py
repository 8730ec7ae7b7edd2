"""``bei.Model`` against the engine alone, on prose it has not met: its rate, and its memory over a long list.

    python -m benchmarks.in_process [--texts 100000] [--length short|passages] [--forms list stream] [--repetitions 5]

In each repetition the same texts are run up to three times: by the engine alone, tokenized beforehand and cut into the
batches that the server's policy would cut from all of them at once (as in ``closed_loop``); by one call of
``Model.embed``; by ``Model.embed_iter``, whose vectors are dropped. Each Model is in a new process, so that it meets
every word anew; it has run steps of many shapes. Its memory counts from the first tenth of the texts on, which a call
of their own has run: until then it fills what it may have under way, and learns most words.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bei import Model
from bei.artifact.manifest import Artifact
from bei.core import Engine, PackedBatch
from bei.scheduler.cost_measurement import measure as measure_costs
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import encoder_of, loaded, sorted_batches, texts_per_s
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.servers import ROOT, environment, revision, tied
from benchmarks.harness.texts import PASSAGES, SHORT, read_prose

ENGINE, WORKER = "engine alone", "worker"
_FORMS = {"list": "Model.embed", "stream": "Model.embed_iter"}
_LENGTHS = {"short": SHORT, "passages": PASSAGES}
_WARM_TEXTS = 2048


def main() -> None:
    options = parsed(__doc__, texts=100_000, length=tuple(_LENGTHS), forms=list(_FORMS), repetitions=5)
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        with loaded(artifact) as engine:
            rounds = Rounds(artifact, engine, Path(scratch), options.texts, options.length)
            sides: dict[str, Callable[[], float]] = {ENGINE: rounds.engine_alone}
            sides |= {_FORMS[form]: partial(rounds.model, form) for form in options.forms}
            rates = alternate(sides, options.repetitions, rounds.prepare)
    results = {
        "of the engine alone": {name: ratio(rates, name, ENGINE) for name in sides if name != ENGINE},
        "memory, MB, of each call": {name: calls[1:] for name, calls in rounds.memory.items()},  # the first: warm-up
        "texts/s": rates,
        "texts": {"a call": options.texts, "length": options.length, "laps": rounds.prose.lap + 1},
        "commit": revision(ROOT),
    }
    write(f"in-process-{options.length}", results)


class Rounds:
    """The texts of one repetition at a time, and the measurements on them."""

    def __init__(self, artifact: Artifact, engine: Engine, scratch: Path, num_texts: int, length: str) -> None:
        self._artifact, self._engine = artifact, engine
        self._costs = measure_costs(engine, vocab_size=artifact.manifest.spec.vocab_size)
        self._home, self._file = scratch / "home", scratch / "texts.jsonl"
        self._home.mkdir()
        self._length = _LENGTHS[length]
        self._all_texts = num_texts
        self._num_texts = 0
        self._batches: list[PackedBatch] = []
        self.prose = read_prose(repeats=True)  # new Models know no word of an earlier lap
        self.memory: dict[str, list[dict[str, float]]] = defaultdict(list)

    def prepare(self) -> None:
        """Texts for the next repetition; few for the warm-up."""
        self._num_texts = self._all_texts if self._num_texts else min(_WARM_TEXTS, self._all_texts)
        texts = self.prose.take(self._num_texts, self._length)
        self._file.write_text(json.dumps(texts))
        self._batches = sorted_batches(encoder_of(self._artifact).encode(texts), self._engine.info.limits, self._costs)

    def engine_alone(self) -> float:
        return texts_per_s(self._engine, self._batches, self._num_texts)

    def model(self, form: str) -> float:
        """Texts a second of a Model in a new process."""
        command = [sys.executable, "-m", "benchmarks.in_process", WORKER, self._artifact.path, self._file, form]
        env = environment(ROOT, self._home)
        done = subprocess.run(tied(command), stdout=subprocess.PIPE, cwd=ROOT, env=env, check=True)
        found = json.loads(done.stdout)
        self.memory[_FORMS[form]].append(found["memory"])
        return self._num_texts / float(found["seconds"])


def work(artifact: str, path: str, form: str) -> dict[str, Any]:
    """In a process of its own: embed the texts of a file; seconds, and memory in MB."""
    texts, rng = json.loads(Path(path).read_text()), random.Random(0)
    first = len(texts) // 10
    with Model(artifact) as model:
        # Shapes of many steps without a word for the tokenizer, as the engine alone has run them.
        most = min(256, model.manifest.max_seq_len)
        model.embed([[rng.randrange(1000, 20_000) for _ in range(rng.randint(8, most))] for _ in range(512)])
        rss_mb, results = [], []

        def embed(part: list[str]) -> None:
            if form == "list":
                results.append(model.embed(part))
            else:
                assert sum(len(chunk.results) for chunk in model.embed_iter(iter(part))) == len(part)
            rss_mb.append(psutil.Process().memory_info().rss / 1e6)

        took_s = seconds(lambda: embed(texts[:first])) + seconds(lambda: embed(texts[first:]))
    result_mb = results[-1].nbytes / 1e6 if results else 0.0
    grown = {"warm": rss_mb[0], "end": rss_mb[1], "result": result_mb, "grown beside the result": 0.0}
    grown["grown beside the result"] = rss_mb[1] - rss_mb[0] - result_mb
    return {"seconds": took_s, "memory": {name: round(value, 1) for name, value in grown.items()}}


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        json.dump(work(*sys.argv[2:]), sys.stdout)
    else:
        main()
