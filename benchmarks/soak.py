"""Minutes of mixed traffic over all routes with random faults of clients: does the server's memory stay where it is?

    python -m benchmarks.soak [--minutes 20] [--clients 8]

RSS, descriptors and threads are sampled; the verdict, after two minutes, is in ``results/soak.json``. Every answer's
status is checked, and of those with 200 how many inputs they are about. Ends with 1 if something was not as expected.
"""

from __future__ import annotations

import random
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import write
from benchmarks.harness.sampling import Samples, sampling
from benchmarks.harness.servers import ROOT, revision, serving
from benchmarks.harness.summaries import flatness
from benchmarks.harness.texts import PASSAGES, SHORT, Prose, read_prose
from benchmarks.soak_traffic import MODELS as NAMES
from benchmarks.soak_traffic import Action, Client, faults, requests
from tests.e2e.kinds import MODELS
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

WARM_S = 120.0
_FAULTS = 0.15  # share of what clients do
_PAUSE_S = 0.01  # of a client, on average
# Of each corpus: few enough for every model to meet every word of them in the first two minutes. Each keeps words up to
# a limit (bei.tokenizer.word_cache), and grows towards it as long as there are new ones: with 100 documents, models of
# rare routes still learned 20 words a second after five minutes, and no other objects of the server grew (tracemalloc).
_DOCUMENTS = 20
_SERVE = ("--openai-token-ids", "accept")
_MOST_REMARKS = 20
_KEPT_SAMPLES = 200


def main() -> int:
    options = parsed(__doc__, minutes=20.0, clients=8, seed=0, serve="")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        with serving(tiny_models(Path(scratch)), *_SERVE, *shlex.split(options.serve), home=home) as server:
            traffic = Traffic(server.port, requests(NAMES), faults(NAMES), options.seed)
            with sampling(server.process.pid, every_s=1.0) as samples:
                traffic.run(options.clients, options.minutes * 60)
            was_alive = server.process.poll() is None
        exit_code = server.process.returncode
    warm_s = min(WARM_S, options.minutes * 60 / 3)
    verdicts = judged(samples, warm_s, options.clients)
    good = was_alive and exit_code == 0 and not traffic.num_wrong and all(v["flat"] for v in verdicts.values())
    results = {
        "as expected": good,
        "minutes": options.minutes,
        "warm, s": warm_s,
        "verdicts": verdicts,
        "alive at the end": was_alive,
        "exit code after SIGTERM": exit_code,
        **traffic.summary(),
        "server": {"commit": revision(ROOT), "flags": options.serve},
        "samples": _thinned(samples),
    }
    write("soak", results)
    return 0 if good else 1


def tiny_models(scratch: Path) -> list[Path]:
    """Artifacts of a random model of each kind."""
    artifacts = []
    for name, case in MODELS.items():
        settings: dict[str, Any] = {"name": name, "reference": "engine", "token_embeddings": name == "embedder"}
        folder = save_case(scratch / f"checkpoint-{name}", case)
        artifacts.append(build_artifact(folder, scratch / name, **settings).path)
    return artifacts


class Traffic:
    """Clients in threads, each doing one thing after the other at random."""

    def __init__(self, port: int, right: Sequence[Action], wrong: Sequence[Action], seed: int) -> None:
        self._port = port
        self._right = right
        self._wrong = wrong
        self._seed = seed
        self._prose: Prose = read_prose(seed, repeats=True, most_documents=_DOCUMENTS)
        self._lock = threading.Lock()  # of the prose and the counts
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._remarks: list[str] = []
        self.num_wrong = 0

    def run(self, num_clients: int, seconds: float) -> None:
        """Until ``seconds`` have passed and the last client has its answer."""
        end_s = time.monotonic() + seconds
        clients = [threading.Thread(target=self._live, args=(number, end_s)) for number in range(num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def summary(self) -> dict[str, Any]:
        return {
            "requests": sum(sum(counts.values()) for counts in self._counts.values()),
            "not as expected": self.num_wrong,
            "remarks": self._remarks,
            "statuses": {name: dict(sorted(counts.items())) for name, counts in sorted(self._counts.items())},
        }

    def _live(self, number: int, end_s: float) -> None:
        rng = random.Random(f"{self._seed} {number}")
        client = Client(self._port, self._texts(rng), rng)
        while time.monotonic() < end_s:
            actions = self._wrong if rng.random() < _FAULTS else self._right
            action = rng.choices(actions, [each.weight for each in actions])[0]
            self._do(action, client)
            time.sleep(rng.expovariate(1 / _PAUSE_S))
        client.close()

    def _do(self, action: Action, client: Client) -> None:
        try:
            status = action.run(client)
            remark = None if status in action.expected else f"{action.name}: {status}"
            outcome = str(status)
        except Exception as error:  # a border: whatever happened to a client is the finding
            client.close()
            outcome, remark = type(error).__name__, f"{action.name}: {type(error).__name__}: {error}"
        with self._lock:
            self._counts[action.name][outcome] += 1
            if remark is not None:
                self.num_wrong += 1
                if len(self._remarks) < _MOST_REMARKS:
                    self._remarks.append(remark)

    def _texts(self, rng: random.Random) -> Any:
        def texts(count: int) -> list[str]:
            with self._lock:
                return self._prose.take(count, SHORT if rng.random() < 0.5 else PASSAGES)

        return texts


def judged(samples: Samples, warm_s: float, num_clients: int) -> dict[str, dict[str, Any]]:
    """The verdicts. Descriptors come and go with the clients' connections; threads should not."""
    times = samples.times_s
    return {
        "RSS, MB": flatness(times, samples.rss_mb, warm_s=warm_s, growth=0.05, spread=0.15),
        "descriptors": flatness(
            times, samples.descriptors, warm_s=warm_s, growth=0.05, spread=0.1, slack=2 * num_clients
        ),
        "threads": flatness(times, samples.threads, warm_s=warm_s, growth=0.05, spread=0.05, slack=1),
    }


def _thinned(samples: Samples) -> dict[str, list[float]]:
    """A few hundred samples, in minutes since the first."""
    step = max(1, len(samples.times_s) // _KEPT_SAMPLES)
    kept = slice(None, None, step)
    return {
        "minutes": [round((time_s - samples.times_s[0]) / 60, 2) for time_s in samples.times_s[kept]],
        "RSS, MB": samples.rss_mb[kept],
        "descriptors": list(map(float, samples.descriptors[kept])),
        "threads": list(map(float, samples.threads[kept])),
    }


if __name__ == "__main__":
    sys.exit(main())
