"""Reranking 100 short documents by a language model: prefixes computed once, and each time, in one run.

    python -m benchmarks.shared_prefixes [--layers 4] [--repetitions 5]

The model has the shape of Qwen3-Reranker-0.6B, random weights, fewer layers and a small vocabulary. A text is a
template with a query (76 tokens, the same in all), a document (12 to 36) and the template's end (9). Another load has
texts of the same lengths that have nothing in common. Both sides are the server's batch manager over the same engine;
one side is told that the engine shares nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bei.core import Encoding, Engine, EngineInfo, Outputs, PackedBatch
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Answer, Item, Submission
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.cost_measurement import measure
from bei.scheduler.cost_model import CostModel
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds

_PREFIX, _SUFFIX, _SHORTEST, _LONGEST, _DOCUMENTS = 76, 9, 12, 36, 100
_VOCABULARY = 30_522
_SETTINGS: dict[str, Any] = {
    **{"max_seq_len": 512, "pooling": "last", "tokenizer": "file"},
    **{"verify": False, "allow_below_threshold": False, "reference": "auto"},
}


class _Unsharing:
    """The engine, said to share nothing. Not closed by its manager, as that of the other side runs it too."""

    def __init__(self, engine: Engine, *, shares: bool) -> None:
        self._engine = engine
        self.info: EngineInfo = replace(engine.info, unshared=engine.info.unshared if shares else "not asked for")

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        return self._engine.run(batch, outputs)

    def warmup(self) -> None:
        self._engine.warmup()

    def close(self) -> None:
        """Nothing."""


class _Side:
    def __init__(self, engine: Engine, costs: CostModel, *, shares: bool) -> None:
        self.metrics = Metrics()
        self._left = 0
        self._done = threading.Event()
        port = _Unsharing(engine, shares=shares)
        self.manager = BatchManager(port, self._answered, costs, ModelMetrics(self.metrics, "reranker"))

    def _answered(self, answers: Sequence[Answer]) -> None:
        self._left -= len(answers)
        if not self._left:
            self._done.set()

    def documents_per_s(self, encodings: Sequence[Encoding]) -> float:
        self._left = len(encodings)
        self._done.clear()
        items = [Item(place, encoding) for place, encoding in enumerate(encodings)]
        submission = Submission(1, "interactive", frozenset(["embedding"]), items, None)

        def ask() -> None:
            self.manager.submit(submission)
            self._done.wait()

        return len(encodings) / seconds(ask)


def main() -> None:
    options = parsed(__doc__, layers=4, repetitions=5)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(_checkpoint(Path(scratch), options.layers), Path(scratch), **_SETTINGS)
        with loaded(artifact) as engine:
            assert engine.info.shares_prefixes
            costs = measure(engine)
            sides = {
                name: _Side(engine, costs.continued(costs.limits), shares=name == "computed once")
                for name in ("computed once", "computed each time")
            }
            for load, prefix in (("rerank", _PREFIX), ("nothing shared", 0)):
                texts = _texts(prefix)
                rates = alternate(
                    {name: partial(side.documents_per_s, texts) for name, side in sides.items()}, options.repetitions
                )
                found[load] = {
                    "ratio": ratio(rates, "computed once", "computed each time"),
                    "tokens of a document": sum(text.num_tokens for text in texts) / len(texts),
                    **{f"{name}, documents a second": rate for name, rate in rates.items()},
                }
            counted = sides["computed once"].metrics.registry
            found["shared tokens of all tokens"] = round(
                (counted.get_sample_value("bei_tokens_shared_total", {"model": "reranker"}) or 0.0)
                / (counted.get_sample_value("bei_tokens_total", {"model": "reranker"}) or 1.0),
                3,
            )
            found["device"] = f"{engine.info.device}, {engine.info.precision}"
            for side in sides.values():
                side.manager.close()
    write("shared-prefixes", {"layers": options.layers, "documents": _DOCUMENTS, **found})


def _texts(num_shared: int) -> list[Encoding]:
    """Texts that begin with the same ``num_shared`` tokens, and end with the same ones."""
    rng = np.random.default_rng(0)
    ids = partial(rng.integers, 1000, _VOCABULARY, dtype=np.int32)
    prefix, suffix = ids(size=num_shared), ids(size=_SUFFIX)
    texts = []
    for length in rng.integers(_SHORTEST, _LONGEST + 1, _DOCUMENTS):
        own = ids(size=_PREFIX - num_shared + length)
        texts.append(Encoding(np.concatenate([prefix, own, suffix])))
    return texts


def _checkpoint(scratch: Path, layers: int) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
    )
    folder = scratch / "qwen3-reranker-shape"
    Qwen3Model(config).save_pretrained(folder)
    shutil.copy(minilm_folder() / "tokenizer.json", folder)
    return folder


if __name__ == "__main__":
    main()
