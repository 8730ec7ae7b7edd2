"""What adapters beside the weights cost against one that is merged, on the mixed-length workload: tokens per second.

    python -m benchmarks.adapters [--repetitions 7]

BERT-base's shape with four random LoRA adapters of all linear layers, of rank 4 (as jina-embeddings-v3 has) and of
rank 32 (as jina-embeddings-v5 has). All sides get the same sequences in the same batches; ``mixed`` has sequences of
all four adapters in each step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bei.core import Encoding
from bei.scheduler.cost_measurement import measure as measure_costs
from bei_build.weights.peft_adapter import CONFIG, WEIGHTS
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded, random_encodings, sorted_batches, tokens_per_s
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.texts import mixed_lengths

_COUNT, _LONGEST = 64, 447
_RANKS, _NUM_ADAPTERS = (4, 32), 4
_LINEAR = (".query.weight", ".key.weight", ".value.weight", ".dense.weight")


def main() -> None:
    options = parsed(__doc__, repetitions=7)
    lengths = mixed_lengths(_COUNT, _LONGEST)
    sides: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        base = checkpoint_folder("bert-base", scratch)
        settings: dict[str, Any] = {
            "max_seq_len": 512,
            "verify": False,
            "reference": "auto",
            "allow_below_threshold": False,
        }
        merged = built(_saved(scratch / "merged", base, 4, 0), scratch, **settings)
        engine = stack.enter_context(loaded(merged))
        encodings = random_encodings(lengths, merged.manifest.spec.vocab_size)
        limits, costs = engine.info.limits, measure_costs(engine)
        batches = partial(sorted_batches, limits=limits, costs=costs)
        sides["merged"] = partial(tokens_per_s, engine, batches(encodings))
        for rank in _RANKS:
            loras = [_saved(scratch / f"rank{rank}-{seed}", base, rank, seed) for seed in range(_NUM_ADAPTERS)]
            named = tuple(f"{path.name}={path}" for path in loras)
            beside = stack.enter_context(loaded(built(base, scratch, f"rank{rank}", lora=named, **settings)))
            one = [encoding._replace(adapter=1) for encoding in encodings]
            sides[f"rank {rank}, one adapter"] = partial(tokens_per_s, beside, batches(one))
            sides[f"rank {rank}, mixed"] = partial(tokens_per_s, beside, batches(_dealt_out(encodings)))
        results = alternate(sides, options.repetitions)
    ratios = {name: ratio(results, name, "merged") for name in sides if name != "merged"}
    write("adapters", {"sides": results, "against merged": ratios})


def _dealt_out(encodings: list[Encoding]) -> list[Encoding]:
    return [encoding._replace(adapter=index % _NUM_ADAPTERS + 1) for index, encoding in enumerate(encodings)]


def _saved(folder: Path, base: Path, rank: int, seed: int) -> Path:
    """A random adapter of ``base`` as PEFT saves it."""
    random, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(_LINEAR) and "pooler" not in name:
            module, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            for kind, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                tensors[f"{module}.lora_{kind}.weight"] = random.normal(0, 0.02, shape).astype(np.float32)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": str(base)}
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS)
    return folder


if __name__ == "__main__":
    main()
