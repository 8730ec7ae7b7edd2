"""``bei inspect --certificate``: the certificate with all of its figures, as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.certificate.record import Agreement, Certificate, CosineHistogram, QuantizationRecord
from bei.artifact.certificate.reliability import ProbabilityCalibration
from bei.artifact.manifest import Artifact
from bei.cli.console_text import console_text

if TYPE_CHECKING:
    from rich.table import Table

_BAR = 40
_MOST_LAYERS = 20


def as_json(artifact: Artifact) -> str:
    """The certificate of the artifact as JSON."""
    return msgspec.json.format(msgspec.json.encode(artifact.certificate), indent=2).decode()


def as_tables(artifact: Artifact) -> str:
    """The certificate as tables."""
    return console_text(*_tables(artifact)).strip("\n")


def _tables(artifact: Artifact) -> Iterator[Table]:
    certificate = artifact.certificate
    yield _table("", [], list(_facts(artifact.manifest.name, certificate)))
    for row in certificate.outputs:
        yield from _agreement_tables(row.output, "texts", row)
    if certificate.images and certificate.images.output:
        yield from _agreement_tables("images", "images", certificate.images.output)
    for row in certificate.labels.outputs if certificate.labels else ():
        yield from _agreement_tables("labels", "labels", row)
    for one in certificate.probabilities or []:
        rows = [
            (f"{place / 10:.1f}", *(f"{row.count}", f"{row.confidence:.3f}", f"{row.accuracy:.3f}"))
            for place, row in enumerate(one.after.bins)
            if row.count
        ]
        yield _table(f"Probabilities of {one.task}", [], list(_temperature(one)))
        yield _table("Reliability after it", ["from", "texts", "mean probability", "right"], rows)
    if certificate.quantization is not None and certificate.quantization.layers:
        yield _layers(certificate.quantization)


def _agreement_tables(name: str, inputs: str, row: Agreement) -> Iterator[Table]:
    yield _table(f"Output {name}", [], list(_figures(row)))
    yield _table(f"Cosines of {name}", ["from", "count", ""], list(_histogram(row.histogram)))
    worst = [(f"{one.cosine:.6f}", repr(one.text[:78])) for one in row.worst_texts]
    yield _table(f"Worst {inputs} of {name}", ["cosine", "text"], worst)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=bool(header), pad_edge=False, title=title or None, title_justify="left")
    for index in range(len(rows[0]) if rows else len(header)):
        table.add_column(header[index] if header else "", no_wrap=index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    return table


def _printable(text: str) -> str:
    """``text`` with unprintable characters replaced, so that it is safe on a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _facts(name: str, certificate: Certificate) -> Iterator[tuple[str, str]]:
    yield "model", name
    yield "verdict", certificate.verdict
    for failure in certificate.failures:
        yield "FAILED", failure
    if certificate.tokens is not None:
        yield "token ids", f"the same for {certificate.tokens}"
    if certificate.kind != "none":
        own = "independent of bei" if certificate.reference_is_independent else "bei's own: self-consistency"
        yield "reference", f"{certificate.reference} ({own})"
    yield "engine answered on", certificate.device or "nothing yet"
    if certificate.num_held_out_texts:
        yield "texts", f"{certificate.num_texts} of {certificate.num_held_out_texts}, sha256 {certificate.texts_sha256}"
    if images := certificate.images:
        yield "images", f"{images.num_images}, sha256 {images.images_sha256}"
    if labels := certificate.labels:
        yield "labels", f"{labels.num_texts} of {labels.num_held_out_texts}, sha256 {labels.texts_sha256}"
    if (needed := certificate.thresholds) is not None:
        yield "needed cosines", f"mean {needed.mean:g}, p1 {needed.p1:g}, min {needed.min:g}"
        if needed.ndcg_loss is not None:
            yield "allowed loss", f"{needed.ndcg_loss:.1%} of the reference's nDCG@10, beyond the standard error"
    if found := certificate.retrieval:
        loss = f"loss {found.loss:.2%}, standard error {found.loss_error:.2%}"
        figures = f"{found.ndcg_engine:.5f}, the reference's {found.ndcg_reference:.5f}, {loss}"
        by_chance = "" if found.is_judged else f" (not judged: a random order has {found.ndcg_chance:.5f})"
        yield "nDCG@10", f"{figures}, by {found.output}{by_chance}"
    elif certificate.retrieval_is_missing:
        is_pending = certificate.kind == "pending"
        yield "nDCG@10", "not measured yet" if is_pending else "not measured: the time for verifying was over"
    if record := certificate.quantization:
        yield "quantized", f"{record.format}, {record.method}"
        texts = f"{record.num_texts:,} texts, {record.num_tokens:,} tokens, sha256 {record.texts_sha256}"
        yield "calibrated on", f"{record.calibration} ({texts})"
        yield "not quantized", f"{sum(layer.is_high for layer in record.layers)} of {len(record.layers)} layers"


def _temperature(found: ProbabilityCalibration) -> Iterator[tuple[str, str]]:
    yield "temperature", f"{found.temperature:.4f}, fitted on {found.num_fitted} texts"
    if found.question:
        yield "question", found.question
    yield "compared on", f"{found.num_texts} others, sha256 of the file {found.sha256}"
    yield "accuracy", f"{found.accuracy:.1%}"
    yield "calibration error", f"{found.before.error:.4f} before, {found.after.error:.4f} after"
    yield "log likelihood", f"-{found.before.nll:.4f} before, -{found.after.nll:.4f} after"


def _figures(row: Agreement) -> Iterator[tuple[str, str]]:
    yield "cosines", f"mean {row.cosine_mean:.6f}, p1 {row.cosine_p1:.6f}, min {row.cosine_min:.6f}"
    yield "largest difference", f"{row.max_abs_difference:.2e}"
    yield "ranking kept", f"{row.ranking_overlap:.1%} of the ten best"
    named = (
        ("Spearman", row.spearman),
        ("Kendall tau", row.kendall_tau),
        ("same label", row.label_agreement),
        ("KL divergence", row.kl_divergence),
        ("difference of scores", row.score_difference),
        ("same spans", row.span_agreement),
    )
    yield from ((name, f"{value:.6f}") for name, value in named if value is not None)


def _histogram(histogram: CosineHistogram) -> Iterator[tuple[str, str, str]]:
    """Buckets, those near 1 first; empty buckets at the end are left out."""
    last = max(place for place, count in enumerate(histogram.counts) if count)
    highest = max(histogram.counts)
    for place, count in enumerate(histogram.counts[: last + 1]):
        above = f"{1 - histogram.edges[place]:.6f}" if place < len(histogram.edges) else "-1"
        yield above, str(count), "#" * -(-count * _BAR // highest)


def _layers(record: QuantizationRecord) -> Table:
    layers = record.by_sensitivity[:_MOST_LAYERS]
    highest = layers[0].sensitivity or 1.0
    name, what, form = ("effect", "effect on the outputs", ".1e") if record.has_effects else ("error", "error", ".4f")
    rows = [
        (
            layer.layer,
            f"{layer.sensitivity:{form}}",
            "#" * round(layer.sensitivity / highest * _BAR),
            "not quantized" * layer.is_high,
        )
        for layer in layers
    ]
    title = f"Layers by their {what}, the {len(layers)} largest of {len(record.layers)}"
    return _table(title, ["layer", name, "", ""], rows)
