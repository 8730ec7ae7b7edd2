"""``certificate.html``: a certificate as a self-contained page without scripts; equal input gives equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bei.artifact.certificate.charts import MOST_LAYERS, histogram_chart, layers_chart, reliability_chart
from bei.artifact.certificate.record import Agreement, Certificate, QuantizationRecord, RetrievalAgreement
from bei.utils.html.document import Cell, document, facts_table, safe, scrolling, table

_TEXT_CHARS = 400  # shown of a worst text; certificate.json has it whole

_KINDS = {
    "reference": "independent of bei's graph",
    "self-consistency": "bei's own FP32 engine, which shares the graph: what is wrong in both does not show",
    "none": "none: nothing was compared",
}

# Captions of the layers' bars.
_ERRORS = (
    "What quantizing a layer does to its product, on tokens of the calibration texts: the difference's length as a "
    "share of the exact product's, averaged by the fourth power."
)
_EFFECTS = (
    "What quantizing a layer alone, and no other, changes of the outputs, on some of the calibration texts: the "
    "squared length of the difference as a share of the exact output's. Layers to leave high were chosen by it."
)


def certificate_page(name: str, facts: Sequence[tuple[str, str]], certificate: Certificate) -> str:
    """The page of the model ``name``; ``facts`` about its artifact are shown as given."""
    parts = [
        f"<h1>Certificate of <bdi>{safe(name)}</bdi></h1>",
        *_verdict(certificate),
        "<h2>What was compared</h2>",
        facts_table([*facts, *_comparison_facts(certificate)]),
        *_outputs(certificate),
        *_images(certificate),
        *_labels(certificate),
        *_retrieval(certificate),
        *_probabilities(certificate),
        *(_quantization(certificate.quantization) if certificate.quantization else ()),
        *(_legend() if certificate.outputs or certificate.images else ()),
    ]
    return document(f"Certificate of {name}", parts)


def _verdict(certificate: Certificate) -> Iterator[str]:
    kind = "pass" if certificate.passed else "open" if certificate.kind in ("none", "pending") else "fail"
    word, _, rest = certificate.verdict.partition(":" if kind == "open" else " on ")
    rest = rest.strip() if kind == "open" else f"on {rest}"
    yield f'<p class="verdict {kind}"><strong>{safe(word.capitalize())}</strong> {safe(rest)}</p>'
    if certificate.failures:
        yield "<h2>What misses its threshold</h2>"
        yield "<ul>" + "".join(f"<li>{safe(failure)}</li>" for failure in certificate.failures) + "</ul>"


def _comparison_facts(certificate: Certificate) -> Iterator[tuple[str, str]]:
    if certificate.tokens is not None:
        yield "Token ids", f"the same for {certificate.tokens}"
    if certificate.kind == "none":
        yield "Reference", _KINDS["none"]
        yield "Engine answered on", certificate.device
        return
    yield "Reference", certificate.reference
    yield "The reference is", _KINDS["reference" if certificate.reference_is_independent else "self-consistency"]
    yield "Engine answered on", certificate.device or "nothing yet"
    if certificate.num_held_out_texts:  # a model that reads images has none
        yield "Held-out texts", f"{certificate.num_texts} of {certificate.num_held_out_texts} compared"
        yield "SHA-256 of the texts", certificate.texts_sha256
    if (needed := certificate.thresholds) is not None:
        yield "Needed cosines", f"mean {needed.mean:g}, first percentile {needed.p1:g}, minimum {needed.min:g}"
        if needed.ndcg_loss is not None:
            yield "Allowed loss of nDCG@10", f"{needed.ndcg_loss:.1%} of the reference's, beyond the standard error"


def _outputs(certificate: Certificate, chart_name: str = "cosines") -> Iterator[str]:
    if not certificate.outputs:
        return
    yield "<h2>Outputs</h2>"
    figures = [_figures(row) for row in certificate.outputs]
    rows: list[list[Cell]] = [
        [(name, False), *((of_row[name] or "-", True) for of_row in figures)]
        for name in figures[0]
        if any(of_row[name] for of_row in figures)
    ]
    verdicts = ["below threshold" if row.failures else "passed" for row in certificate.outputs]
    rows.append([("Verdict", False), *((verdict, True) for verdict in verdicts)])
    yield table("Each output against the reference", ["Figure", *(row.output for row in certificate.outputs)], rows)
    for index, row in enumerate(certificate.outputs):
        yield f"<h3>Output {safe(row.output)}</h3>"
        chart = histogram_chart(row, certificate.thresholds, f"{chart_name}-{index}")
        yield scrolling(f"Chart of the cosines of {row.output}", chart, kind="scroll from-end")
        worst = [[(f"{one.cosine:.6f}", True), (_shortened(one.text), False)] for one in row.worst_texts]
        yield table(f"The texts with the lowest cosines of {row.output}", ["Cosine", "Text"], worst)


def _images(certificate: Certificate) -> Iterator[str]:
    if not (found := certificate.images):
        return
    yield "<h2>Images</h2>"
    facts = [("Reference", found.reference), ("Engine answered on", found.device)]
    facts += [("Images", f"{found.num_images}, drawn by a script"), ("SHA-256 of their files", found.images_sha256)]
    yield facts_table(facts)
    if (row := found.output) is None:
        return
    rows: list[list[Cell]] = [[(name, False), (value, True)] for name, value in _figures(row).items() if value]
    rows.append([("Verdict", False), ("below threshold" if row.failures else "passed", True)])
    yield table("The vectors of images against the reference", ["Figure", "embedding"], rows)
    yield scrolling("Chart of the cosines of images", histogram_chart(row, found.thresholds, "cosines-images"))
    worst = [[(f"{one.cosine:.6f}", True), (_shortened(one.text), False)] for one in row.worst_texts]
    yield table("The images with the lowest cosines", ["Cosine", "Image"], worst)


def _labels(certificate: Certificate) -> Iterator[str]:
    if found := certificate.labels:
        yield "<h2>The tower of labels</h2>"
        yield facts_table([*_comparison_facts(found)])
        yield from _outputs(found, "labels")


def _figures(row: Agreement) -> dict[str, str | None]:
    return {
        "Mean cosine": f"{row.cosine_mean:.6f}",
        "First percentile": f"{row.cosine_p1:.6f}",
        "Minimum": f"{row.cosine_min:.6f}",
        "Largest difference": f"{row.max_abs_difference:.1e}",
        "Top-10 overlap": f"{row.ranking_overlap:.1%}",
        "Spearman": _optional(row.spearman, ".5f"),
        "Kendall tau": _optional(row.kendall_tau, ".5f"),
        "Same label": _optional(row.label_agreement, ".2%"),
        "KL divergence": _optional(row.kl_divergence, ".6f"),
        "Difference of scores": _optional(row.score_difference, ".5f"),
        "Same spans": _optional(row.span_agreement, ".2%"),
    }


def _optional(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _retrieval(certificate: Certificate) -> Iterator[str]:
    if certificate.retrieval_is_missing:
        yield "<h2>Retrieval</h2>"
        is_pending = certificate.kind == "pending"
        yield "<p>Not measured yet.</p>" if is_pending else "<p>Not measured: the time for verifying was over.</p>"
    elif certificate.retrieval is not None:
        yield "<h2>Retrieval</h2>"
        yield facts_table(_retrieval_facts(certificate.retrieval))


def _retrieval_facts(found: RetrievalAgreement) -> Iterator[tuple[str, str]]:
    yield "Set", f"{found.num_queries} queries, {found.num_documents} documents, bundled with bei; by {found.output}"
    yield "nDCG@10 of the reference", f"{found.ndcg_reference:.5f}"
    yield "nDCG@10 of the engine", f"{found.ndcg_engine:.5f}"
    yield "nDCG@10 of a random order", f"{found.ndcg_chance:.5f}"
    yield "Loss", f"{found.loss:.2%} of the reference's, standard error {found.loss_error:.2%}"
    if not found.is_judged:
        yield "Verdict", "not judged: the reference itself hardly ranks these texts, or nobody asked for a threshold"
    else:
        yield "Verdict", "below threshold" if found.failures else "passed"


def _probabilities(certificate: Certificate) -> Iterator[str]:
    for index, found in enumerate(certificate.probabilities or []):
        before, after = found.before, found.after
        yield f"<h2>Probabilities of {safe(found.task)}</h2>"
        yield facts_table(
            [
                ("Temperature", f"{found.temperature:.4f}, fitted on {found.num_fitted:,} labelled texts"),
                *([("Question", found.question)] if found.question else []),
                ("Compared on", f"{found.num_texts:,} other texts of the same file"),
                ("SHA-256 of the file", found.sha256),
                ("Accuracy", f"{found.accuracy:.2%}"),
                ("Expected calibration error", f"{before.error:.4f} before, {after.error:.4f} after"),
                ("Negative log likelihood", f"{before.nll:.4f} before, {after.nll:.4f} after"),
            ]
        )
        yield scrolling(f"Reliability of {found.task}", reliability_chart(found, f"reliability-{index}"))


def _quantization(record: QuantizationRecord) -> Iterator[str]:
    num_high = sum(layer.is_high for layer in record.layers)
    yield "<h2>Quantization</h2>"
    yield facts_table(
        [
            ("Format", record.format),
            ("Method", record.method),
            ("Calibration", record.calibration),
            ("Calibration texts", f"{record.num_texts:,} texts, {record.num_tokens:,} tokens"),
            ("SHA-256 of those texts", record.texts_sha256),
            ("Layers not quantized", f"{num_high} of {len(record.layers)}"),
        ]
    )
    if record.layers:
        yield "<h3>Sensitivity of the layers</h3>"
        what = _EFFECTS if record.has_effects else _ERRORS
        yield f'<p class="quiet">{what} Hatched: left in the higher precision.</p>'
        if len(record.layers) > MOST_LAYERS:
            yield f"<p>The {MOST_LAYERS} largest of {len(record.layers)}; certificate.json has all.</p>"
        yield scrolling("Chart of the layers", layers_chart(record, "layers"))
        if undrawn := [layer.layer for layer in record.by_sensitivity[MOST_LAYERS:] if layer.is_high]:
            yield f"<p>Left in the higher precision too, and not drawn: {safe(', '.join(undrawn))}.</p>"


def _legend() -> Iterator[str]:
    yield "<h2>What the figures say</h2>"
    yield (
        "<p class=\"quiet\">Cosines are between the engine's and the reference's vector of a text, or of a token. For "
        "scores of labels the mean is their correlation over all texts, and the other figures are over each text's "
        "share in it. Largest difference: of a component, vectors at unit length. Top-10 overlap: how many of each "
        "text's ten nearest neighbours (of labels: of the ten texts that score highest) both agree on. Spearman: rank "
        "correlation of the similarities of all pairs. Kendall tau: rank correlation (tau-b) of a reranker's scores. "
        "Same label: share of rows in which both score the same label highest. KL divergence: of the engine's "
        "probabilities from the reference's, in nats.</p>"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else text[:_TEXT_CHARS] + " …"
