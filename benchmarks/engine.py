"""The engine alone against eager PyTorch, on the mixed-length workload: tokens per second.

    python -m benchmarks.engine [--shape minilm|bert-base|decoder-0.5b] [--repetitions 7] [--kernels] [--length 512]

Both sides get the same sequences, sorted by length; ``--length`` gives all of them that many tokens. PyTorch runs the
Hugging Face model on padded batches of at most 512 and of at most 2048 padded tokens, and the better of the two counts.
Without BF16 in the CPU nothing is measured in BF16. ``--kernels`` compares the engine with ``bei-kernels-cpu`` and
without it instead, and their vectors, and says what share of the speed of products alone it attains.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Engine, Float32Array, PackedBatch
from bei.utils.cpu_count import usable_cores
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded, mixed_batches, precisions, random_encodings, tokens_per_s
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.products import operations_per_token, products, share_of_products
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.texts import mixed_lengths

_COUNTS = {"minilm": 256, "bert-base": 64, "decoder-0.5b": 32}  # sequences of mixed lengths
_LONGEST = 447
_MAX_SEQ_LEN = 512
_PADDED_TOKENS = (512, 2048)
_PRECISIONS = ("bf16", "fp32", "int8")

Sides: TypeAlias = dict[str, Callable[[], float]]


def main() -> None:
    options = parsed(__doc__, shape=tuple(_COUNTS), repetitions=7, kernels=False, length=0, precisions=[*_PRECISIONS])
    lengths = _lengths(_COUNTS[options.shape], options.length)
    suffix = options.shape.replace(".", "-") + (f"-{options.length}" if options.length else "")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        checkpoint = checkpoint_folder(options.shape, scratch)
        artifacts = {
            precision: built(checkpoint, scratch, max_seq_len=_MAX_SEQ_LEN, precision=precision)
            for precision in precisions(*options.precisions)
        }
        if options.kernels:
            found = _kernels(checkpoint, artifacts, lengths, options.repetitions, stack)
            write(f"kernels-{suffix}", found)
            return
        sides = _beside_torch(checkpoint, artifacts, lengths, stack)
        results = alternate(sides, options.repetitions)
    write(f"engine-{suffix}", {**_summary(results), "sides": results})


def _lengths(count: int, length: int) -> list[int]:
    """Mixed ones, or about as many tokens in sequences of ``length``."""
    mixed = mixed_lengths(count, _LONGEST)
    return [length] * round(sum(mixed) / length) if length else mixed


def _kernels(
    checkpoint: Path, artifacts: Mapping[str, Artifact], lengths: list[int], repetitions: int, stack: ExitStack
) -> dict[str, Any]:
    sides, cosines = _with_and_without_kernels(artifacts, lengths, stack)
    floats = [name for name in artifacts if name != "int8"]
    for precision in floats:
        sides.update(products(precision))
    results = alternate(sides, repetitions)
    per_token = operations_per_token(json.loads((checkpoint / "config.json").read_bytes()), lengths)
    return {
        "with / without": {name: ratio(results, f"{name} with kernels", f"{name} without") for name in artifacts},
        "cosine, lowest": cosines,
        "share of products": {
            name: share_of_products(results, f"{name} with kernels", name, per_token) for name in floats
        },
        "sides": results,
    }


def _beside_torch(checkpoint: Path, artifacts: Mapping[str, Artifact], lengths: list[int], stack: ExitStack) -> Sides:
    sides: Sides = {}
    for precision, artifact in artifacts.items():
        engine = stack.enter_context(loaded(artifact))
        batches = mixed_batches(engine, artifact, lengths)
        sides[f"bei {precision}"] = partial(tokens_per_s, engine, batches)
    encodings = random_encodings(lengths, artifact.manifest.spec.vocab_size)
    for precision in precisions("bf16", "fp32"):
        run = _torch_model(checkpoint, precision)
        for padded in _PADDED_TOKENS:
            groups = _padded_groups(encodings, padded)
            sides[f"torch {precision}, {padded}"] = partial(_torch_tokens_per_s, run, groups)
    return sides


def _with_and_without_kernels(
    artifacts: Mapping[str, Artifact], lengths: list[int], stack: ExitStack
) -> tuple[Sides, dict[str, float]]:
    """And the lowest cosine between the two in each precision. Both run the same batches."""
    sides: Sides = {}
    cosines = {}
    for precision, artifact in artifacts.items():
        ours, theirs = (stack.enter_context(loaded(artifact, {"use_kernels": use})) for use in (1, 0))
        if "bei-kernels-cpu" not in ours.info.device:
            raise SystemExit("bei-kernels-cpu is not installed: pip install ./kernels")
        batches = mixed_batches(theirs, artifact, lengths)
        sides[f"{precision} with kernels"] = partial(tokens_per_s, ours, batches)
        sides[f"{precision} without"] = partial(tokens_per_s, theirs, batches)
        cosines[precision] = min(float(_cosines(ours, theirs, batch).min()) for batch in batches)
    return sides, cosines


def _cosines(first: Engine, second: Engine, batch: PackedBatch) -> Float32Array:
    """Of the vectors of each sequence."""
    one, other = (engine.run(batch)["embedding"] for engine in (first, second))
    shares: Float32Array = (one * other).sum(1) / (np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1))
    return shares


def _torch_tokens_per_s(run: Callable[[Any], object], groups: list[tuple[Any, int]]) -> float:
    elapsed = seconds(lambda: [run(padded) for padded, _ in groups])
    return sum(tokens for _, tokens in groups) / elapsed


def _torch_model(folder: Path, precision: str) -> Callable[[Any], object]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(usable_cores())
    model = AutoModel.from_pretrained(folder, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[precision]).eval()

    def run(padded: Any) -> object:
        with torch.inference_mode():
            states = model(**padded).last_hidden_state.float()
            mask = padded["attention_mask"][..., None]
            return (states * mask).sum(1) / mask.sum(1)

    return run


def _padded_groups(encodings: list[Encoding], most: int) -> list[tuple[Any, int]]:
    """Length-sorted batches of at most ``most`` padded tokens, each with its real tokens counted."""
    import torch

    groups: list[list[Encoding]] = [[]]
    for encoding in sorted(encodings, key=lambda e: e.num_tokens):
        if groups[-1] and encoding.num_tokens * (len(groups[-1]) + 1) > most:
            groups.append([])
        groups[-1].append(encoding)
    padded = []
    for group in groups:
        width = group[-1].num_tokens
        ids = torch.zeros(len(group), width, dtype=torch.long)
        for row, encoding in enumerate(group):
            ids[row, : encoding.num_tokens] = torch.from_numpy(encoding.input_ids)
        lengths = torch.tensor([encoding.num_tokens for encoding in group])
        mask = (torch.arange(width) < lengths[:, None]).long()
        padded.append(({"input_ids": ids, "attention_mask": mask}, int(lengths.sum())))
    return padded


def _summary(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    best = {name: float(side["median"]) for name, side in results.items()}
    for precision in precisions("bf16", "fp32"):
        best[f"torch {precision}"] = max(best[f"torch {precision}, {padded}"] for padded in _PADDED_TOKENS)
    pairs = [
        ("bf16", "torch bf16"),
        ("bf16", "torch fp32"),
        ("fp32", "torch fp32"),
        ("int8", "bei bf16"),
        ("int8", "bei fp32"),
    ]
    measured = [(over, under) for over, under in pairs if {f"bei {over}", under} <= best.keys()]
    return {f"bei {over} / {under}": round(best[f"bei {over}"] / best[under], 3) for over, under in measured}


if __name__ == "__main__":
    main()
