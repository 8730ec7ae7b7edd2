"""The engine alone against eager PyTorch, on the mixed-length workload: tokens per second.

    python -m benchmarks.engine [--shape minilm|bert-base] [--repetitions 7]

Both sides get the same sequences, sorted by length. PyTorch runs the Hugging Face model on padded batches of at most
512 and of at most 2048 padded tokens, and the better of the two counts. The ceiling is what a large product of BF16
matrices reaches in PyTorch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bei.core import Encoding, PackedBatch
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.utils.cpu_count import usable_cores
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.spec.model_spec import ModelSpec
from benchmarks.common import alternate, mixed_lengths, random_encodings, seconds, sorted_batches, write
from benchmarks.models import built, checkpoint_folder

_COUNTS = {"minilm": 256, "bert-base": 64}
_LONGEST = 447
_PADDED_TOKENS = (512, 2048)
# The ceiling: products of square matrices, large enough that nothing but arithmetic counts.
_PRODUCT, _PRODUCTS = 2048, 8
_CEILING = "torch bf16, a large product, FLOP/s"


def main() -> None:
    """Measure and write ``results/engine-<shape>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(_COUNTS), default="minilm")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(options.shape, options.repetitions, Path(scratch))


def measure(shape: str, repetitions: int, scratch: Path) -> None:
    """Run all sides in turn."""
    folder = checkpoint_folder(shape, scratch)
    lengths = mixed_lengths(_COUNTS[shape], _LONGEST)
    sides: dict[str, Callable[[], float]] = {}
    for precision in ("bf16", "fp32", "int8"):
        artifact = built(folder, scratch, max_seq_len=512, precision=precision)
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        engine.warmup()
        encodings = random_encodings(lengths, artifact.manifest.spec.vocab_size)
        batches = sorted_batches(encodings, engine.info.limits, measure_costs(engine))
        sides[f"bei {precision}"] = partial(_tokens_per_s, engine.run, batches)
    for precision in ("bf16", "fp32"):
        run = _torch_model(folder, precision)
        for padded in _PADDED_TOKENS:
            groups = _padded_groups(encodings, padded)
            sides[f"torch {precision}, {padded}"] = partial(_torch_tokens_per_s, run, groups)
    sides[_CEILING] = _product_flops_per_s
    results = alternate(sides, repetitions)
    spec = read_checkpoint(locate(str(folder))).spec
    write(f"engine-{shape}", {**_summary(results, _flops(spec, lengths) / sum(lengths)), "sides": results})


def _tokens_per_s(run: Callable[[PackedBatch], object], batches: list[PackedBatch]) -> float:
    elapsed = seconds(lambda: [run(batch) for batch in batches])
    return sum(batch.num_tokens for batch in batches) / elapsed


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


def _flops(spec: ModelSpec, lengths: list[int]) -> float:
    """Useful floating point operations: matrices on real tokens, attention on real pairs."""
    layer, hidden = spec.layers[0], spec.hidden_size
    matrices = 4 * hidden * layer.attention.width + 2 * hidden * layer.mlp.intermediate_size
    attention = 2 * layer.attention.width
    return len(spec.layers) * sum(2.0 * (n * matrices + n * n * attention) for n in lengths)


def _product_flops_per_s() -> float:
    """Of a large product of BF16 matrices in torch, on all cores: whatever instructions the CPU has for it."""
    import torch

    left, right = torch.rand(2, _PRODUCT, _PRODUCT).to(torch.bfloat16)
    elapsed = seconds(lambda: [left @ right for _ in range(_PRODUCTS)])
    return _PRODUCTS * 2.0 * _PRODUCT**3 / elapsed


def _summary(results: dict[str, dict[str, Any]], flops_per_token: float) -> dict[str, Any]:
    def median(name: str) -> float:
        return float(results[name]["median"])

    torch_bf16 = max(median(f"torch bf16, {padded}") for padded in _PADDED_TOKENS)
    torch_fp32 = max(median(f"torch fp32, {padded}") for padded in _PADDED_TOKENS)
    ceiling = median(_CEILING)
    return {
        "bei bf16 / torch bf16": round(median("bei bf16") / torch_bf16, 3),
        "bei bf16 / torch fp32": round(median("bei bf16") / torch_fp32, 3),
        "bei fp32 / torch fp32": round(median("bei fp32") / torch_fp32, 3),
        "bei int8 / bei bf16": round(median("bei int8") / median("bei bf16"), 3),
        "bf16 product, GFLOP/s": round(ceiling / 1e9),
        "bei bf16, share of that": round(median("bei bf16") * flops_per_token / ceiling, 3),
    }


if __name__ == "__main__":
    main()
