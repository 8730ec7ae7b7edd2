"""Distances of engines from the Hugging Face classes, for each case of ``tests.support.zoo``.

``python -m tests.model_matrix`` measures all of them and writes their table into docs/models.md; with ``--width 768
--layers 4`` the table of realistic widths in it, and with ``--width 2048 --layers 4 --first`` that of the first case of
each family.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto

from bei.artifact.manifest import Artifact
from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei_build.targets.openvino import cpu_capabilities
from tests.support.builds import build_artifact, running
from tests.support.zoo import CASES, FIRST_OF_FAMILY, MAX_TOKENS, Case, encodings_of, hf_outputs, save_case, widened

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"

# Shortest and longest, both sides of a bucket, and both sides of what zoo checkpoints call long and a window.
LENGTHS = (1, MAX_TOKENS, 2, 17, 16, 5, 33, 9)

_COLUMNS = ("Family", "Architecture", "Special", "Output", "FP32, in batches", "FP32, alone", "BF16, min cosine")


@dataclass(frozen=True)
class Measured:
    """The figures of one case. ``bf16`` is None where the CPU does not compute in it."""

    in_batches: float
    alone: float
    bf16: float | None


def run(
    artifact: Artifact, output: str, encodings: Sequence[Encoding]
) -> tuple[list[Float32Array], list[Float32Array]]:
    """``output`` of each encoding, [width], or [tokens, width] of an output per token: all in one batch, and alone."""
    with running(artifact) as engine:

        def rows(members: Sequence[Encoding]) -> list[Float32Array]:
            batch = PackedBatch.from_encodings(members)
            return rows_of_sequences(engine.run(batch)[output], batch, per_token=output in engine.info.per_token)

        return rows(encodings), [rows([encoding])[0] for encoding in encodings]


def poolings_of(case: Case) -> tuple[str | None, ...]:
    """What an embedder is built with: as its class says, and another way. None: as the class says."""
    if case.output != "embedding" or case.vector:
        return (None,)
    return (None, "cls" if default_pooling(case) == "mean" else "mean")


def default_pooling(case: Case) -> str:
    """How an embedder is pooled whose files do not say it: decoders give the last token's state."""
    if case.vector:
        return case.vector[1]
    # Classes that are embedders only: EmbeddingGemma's and, by another name, Nemotron's.
    embeds_only = case.architecture == "Gemma3TextModel" or "architectures" in case.changes
    return "last" if _is_decoder(case) and not embeds_only else "mean"


def _is_decoder(case: Case) -> bool:
    """As transformers' own tables say it: a causal language model, and no masked one (BERT's type has both)."""
    model_type = getattr(transformers, case.architecture).config_class.model_type
    causal, masked = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return model_type in causal and model_type not in masked


def pooled(case: Case, rows: Sequence[Float32Array], pooling: str | None) -> list[Float32Array]:
    """Rows of ``hf_outputs``, token states pooled by ``pooling``; other outputs as they are."""
    if case.output != "embedding" or case.vector:
        return list(rows)
    pool = {"mean": lambda states: states.mean(0), "cls": lambda states: states[0], "last": lambda states: states[-1]}
    return [pool[pooling or default_pooling(case)](states) for states in rows]


def difference(actual: Sequence[Float32Array], expected: Sequence[Float32Array]) -> float:
    """The largest, over all values of all sequences."""
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(actual, expected, strict=True))


def least_cosine(case: Case, actual: Sequence[Float32Array], expected: Sequence[Float32Array]) -> float:
    """Over vectors; logits are too few for a cosine each, so those of all sequences are one vector."""
    ours, theirs = (np.concatenate([np.atleast_2d(part) for part in side]) for side in (actual, expected))
    if case.output in ("logits", "token_logits"):
        ours, theirs = ours.reshape(1, -1), theirs.reshape(1, -1)
    products = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    return float(products.min())


def build_fp32(folder: Path, out: Path, pooling: str | None) -> Artifact:
    """Certified against the HF model: below 0.99999 the build fails."""
    return build_artifact(folder, out, pooling=pooling)


def build_bf16(folder: Path, out: Path) -> Artifact:
    """Without a certificate: it is stricter with logits, which it centres, than random weights allow."""
    return build_artifact(folder, out, precision="bf16", verify=False)


def measure(case: Case) -> Measured:
    """Save, build, run and compare ``case``."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_case(Path(scratch) / "checkpoint", case)
        encodings = encodings_of(case, LENGTHS, case.tokenizer().get_vocab_size())
        rows = hf_outputs(folder, case, encodings)
        in_batches, alone, bf16 = [], [], None
        for pooling in poolings_of(case):
            expected = pooled(case, rows, pooling)
            artifact = build_fp32(folder, Path(scratch) / "fp32", pooling)
            in_one, by_itself = run(artifact, case.output, encodings)
            in_batches.append(difference(in_one, expected))
            alone.append(difference(by_itself, expected))
            if pooling is None and "BF16" in cpu_capabilities():
                artifact = build_bf16(folder, Path(scratch) / "bf16")
                bf16 = least_cosine(case, run(artifact, case.output, encodings)[0], expected)
    return Measured(max(in_batches), max(alone), bf16)


def row_start(case: Case) -> str:
    """What the row of ``case`` begins with."""
    return f"| {case.family} | `{case.architecture}` | {case.note} | {case.output} |"


def _row(case: Case, measured: Measured) -> str:
    bf16 = "not measured" if measured.bf16 is None else f"{measured.bf16:.5f}"
    return f"{row_start(case)} {measured.in_batches:.1e} | {measured.alone:.1e} | {bf16} |"


def _sections() -> dict[str, str]:
    """The tables of the document by title."""
    texts = DOCUMENT.read_text().split("\n## ")[1:]
    return {text.split("\n")[0]: f"## {text.rstrip()}\n" for text in texts}


def _write(title: str, note: str, rows: Sequence[str]) -> None:
    """Put the table into the document, in place of the one with its ``title``; the others stay."""
    header = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    sections = {**_sections(), title: "\n".join([f"## {title}", "", note, "", *header, *rows, ""])}
    # By the first number in the title, the width.
    ordered = [sections[title] for title in sorted(sections, key=lambda title: int(re.findall(r"\d+", title)[0]))]
    above = DOCUMENT.read_text().split("\n## ")[0]
    DOCUMENT.write_text("\n".join([above, *ordered]))


def main() -> None:
    """Measure and write."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, help="hidden size, a multiple of 64 (default: that of tests.zoo)")
    parser.add_argument("--layers", type=int, default=4, help="layers, where --width is given")
    parser.add_argument("--first", action="store_true", help="only the first case of each family")
    parser.add_argument("--missing", action="store_true", help="only cases without a row; the other rows stay")
    arguments = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny matrices are slower on several
    title = "Small: hidden size 32, 3 layers, heads of 8 or 12"
    if arguments.width:
        title = f"Realistic widths: hidden size {arguments.width}, {arguments.layers} layers, heads of 64"
    if arguments.first:
        title += ", the first case of each family"
    old = _sections().get(title, "").split("\n") if arguments.missing else []
    started_s, rows = time.monotonic(), []
    for case in FIRST_OF_FAMILY if arguments.first else CASES:
        kept = next((line for line in old if line.startswith(row_start(case))), None)
        resized = widened(case, arguments.width, arguments.layers) if arguments.width else case
        rows.append(kept or _row(case, measure(resized)))
        print(rows[-1], flush=True)  # noqa: T201
    minutes = (time.monotonic() - started_s) / 60
    note = f"Measured in {minutes:.1f} minutes, PyTorch {torch.__version__}."
    _write(title, old[2] if old else note, rows)


if __name__ == "__main__":
    main()
