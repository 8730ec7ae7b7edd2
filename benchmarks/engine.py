"""The engine alone against eager PyTorch, on the mixed-length workload: tokens per second.

    python -m benchmarks.engine [--shape minilm|bert-base] [--repetitions 7]

Both sides get the same sequences, sorted by length. PyTorch runs the Hugging Face model on padded batches of at most
512 and of at most 2048 padded tokens, and the better of the two counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bei.core import Encoding
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.utils.cpu_count import usable_cores
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded, random_encodings, sorted_batches, tokens_per_s
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, seconds
from benchmarks.harness.texts import mixed_lengths

_COUNTS = {"minilm": 256, "bert-base": 64}
_LONGEST = 447
_PADDED_TOKENS = (512, 2048)


def main() -> None:
    options = parsed(__doc__, shape=tuple(_COUNTS), repetitions=7)
    lengths = mixed_lengths(_COUNTS[options.shape], _LONGEST)
    sides: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        checkpoint = checkpoint_folder(options.shape, scratch)
        for precision in ("bf16", "fp32", "int8"):
            artifact = built(checkpoint, scratch, max_seq_len=512, precision=precision)
            engine = stack.enter_context(loaded(artifact))
            encodings = random_encodings(lengths, artifact.manifest.spec.vocab_size)
            batches = sorted_batches(encodings, engine.info.limits, measure_costs(engine))
            sides[f"bei {precision}"] = partial(tokens_per_s, engine, batches)
        for precision in ("bf16", "fp32"):
            run = _torch_model(checkpoint, precision)
            for padded in _PADDED_TOKENS:
                groups = _padded_groups(encodings, padded)
                sides[f"torch {precision}, {padded}"] = partial(_torch_tokens_per_s, run, groups)
        results = alternate(sides, options.repetitions)
    write(f"engine-{options.shape}", {**_summary(results), "sides": results})


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
    for precision in ("bf16", "fp32"):
        best[f"torch {precision}"] = max(best[f"torch {precision}, {padded}"] for padded in _PADDED_TOKENS)
    pairs = [("bf16", "torch bf16"), ("bf16", "torch fp32"), ("fp32", "torch fp32"), ("int8", "bei bf16")]
    return {f"bei {over} / {under}": round(best[f"bei {over}"] / best[under], 3) for over, under in pairs}


if __name__ == "__main__":
    main()
