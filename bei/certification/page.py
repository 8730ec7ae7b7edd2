"""``certificate.html``: a certificate as a page that needs nothing but itself. No script; equal input, equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from bei.certificate import Agreement, Certificate, QuantizationRecord, RetrievalAgreement
from bei.certification.charts import MOST_LAYERS, histogram_chart, layers_chart, safe

_TEXT_CHARS = 400  # of a worst text; certificate.json has all of it

_FRAME_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --quiet: #57606a; --line: #d0d7de; --bar: #2f6fb0;
  --low: #b3261e; --high: #c77700; --pass: #1a6b35; --fail: #b3261e; --open: #8a5a00; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e4e8ec; --quiet: #a3adb8; --line: #3a424a;
  --bar: #6fa8dc; --low: #ff8a80; --high: #f2b34c; --pass: #6fcf8d; --fail: #ff8a80; --open: #f2b34c;
  --tint: #1d2227; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 56rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
@media print { :root { color-scheme: light; --page: #ffffff; --text: #000000; --quiet: #444444; --line: #999999;
  --bar: #2f6fb0; --low: #b3261e; --high: #c77700; --pass: #1a6b35; --fail: #b3261e; --open: #8a5a00; --tint: #ffffff; }
  body { max-width: none; padding: 0; font-size: 11pt; } }
"""

# Of what stands in the page, without its colours: the server's page (/ui) shows it in its own.
CONTENT_STYLE = """
* { box-sizing: border-box; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .5rem 0; }
.verdict { border-left: 6px solid; padding: .5rem .9rem; background: var(--tint); font-size: 1.1rem; }
.pass { border-color: var(--pass); } .pass strong { color: var(--pass); }
.fail { border-color: var(--fail); } .fail strong { color: var(--fail); }
.open { border-color: var(--open); } .open strong { color: var(--open); }
.quiet { color: var(--quiet); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: var(--quiet); padding: .25rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } tbody th { font-weight: 500; }
td { overflow-wrap: anywhere; }
.number { width: 1%; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts th { width: 14rem; color: var(--quiet); }
svg { display: block; width: 100%; height: auto; margin: .5rem 0; font: 10.5px system-ui, sans-serif; }
svg text { fill: var(--text); } svg .count, svg .tick { text-anchor: middle; } svg .tick { fill: var(--quiet); }
svg .count { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .name { text-anchor: end; } svg .limit { fill: var(--quiet); }
svg .bar { fill: var(--bar); } svg .low { fill: var(--low); } svg .high { fill: var(--high); }
svg .hatch { stroke: var(--page); stroke-width: 4; } svg .axis { stroke: var(--quiet); }
svg .threshold { stroke: var(--quiet); stroke-dasharray: 4 3; }
.from-end { direction: rtl; } .from-end svg { direction: ltr; }
@media (max-width: 40rem) { svg { width: 40rem; } .facts th { width: 8rem; } }
@media print { * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  svg, tr, .verdict { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; } }
"""

_KINDS = {
    "reference": "independent of bei's graph",
    "self-consistency": "bei's own FP32 engine, which shares the graph: what is wrong in both does not show",
    "none": "none: nothing was compared",
}

_NUMBER = ' class="number"'

# A cell of a table, and whether it is a number.
_Cell: TypeAlias = "tuple[str, bool]"


def certificate_page(name: str, facts: Sequence[tuple[str, str]], certificate: Certificate) -> str:
    """The page of the model ``name``; ``facts`` about its artifact are shown as they are given."""
    parts = [
        f"<h1>Certificate of <bdi>{safe(name)}</bdi></h1>",
        *_verdict(certificate),
        "<h2>What was compared</h2>",
        _facts([*facts, *_comparison_facts(certificate)]),
        *_outputs(certificate),
        *_retrieval(certificate),
        *(_quantization(certificate.quantization) if certificate.quantization else ()),
        *(_legend() if certificate.outputs else ()),
    ]
    content = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Certificate of {safe(name)}</title>\n<style>{_FRAME_STYLE}{CONTENT_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def _verdict(certificate: Certificate) -> Iterator[str]:
    kind = "pass" if certificate.passed else "open" if certificate.kind in ("none", "pending") else "fail"
    word, _, rest = certificate.verdict.partition(":" if kind == "open" else " on ")
    rest = rest.strip() if kind == "open" else f"on {rest}"
    yield f'<p class="verdict {kind}"><strong>{safe(word.capitalize())}</strong> {safe(rest)}</p>'
    if certificate.failures:
        yield "<h2>What misses its threshold</h2>"
        yield "<ul>" + "".join(f"<li>{safe(failure)}</li>" for failure in certificate.failures) + "</ul>"


def _comparison_facts(certificate: Certificate) -> Iterator[tuple[str, str]]:
    if certificate.kind == "none":
        yield "Reference", _KINDS["none"]
        yield "Engine answered on", certificate.device
        return
    yield "Reference", certificate.reference
    yield "The reference is", _KINDS["reference" if certificate.reference_is_independent else "self-consistency"]
    yield "Engine answered on", certificate.device or "nothing yet"
    yield "Held-out texts", f"{certificate.num_texts} of {certificate.num_held_out_texts} compared"
    yield "SHA-256 of the texts", certificate.texts_sha256
    if (needed := certificate.thresholds) is not None:
        yield "Needed cosines", f"mean {needed.mean:g}, first percentile {needed.p1:g}, minimum {needed.min:g}"
        if needed.ndcg_loss is not None:
            yield "Allowed loss of nDCG@10", f"{needed.ndcg_loss:.1%} of the reference's, beyond the standard error"


def _outputs(certificate: Certificate) -> Iterator[str]:
    if not certificate.outputs:
        return
    yield "<h2>Outputs</h2>"
    figures = [_figures(row) for row in certificate.outputs]
    rows: list[list[_Cell]] = [
        [(name, False), *((of_row[name] or "-", True) for of_row in figures)]
        for name in figures[0]
        if any(of_row[name] for of_row in figures)
    ]
    verdicts = ["below threshold" if row.failures else "passed" for row in certificate.outputs]
    rows.append([("Verdict", False), *((verdict, True) for verdict in verdicts)])
    yield _table("Each output against the reference", ["Figure", *(row.output for row in certificate.outputs)], rows)
    for index, row in enumerate(certificate.outputs):
        yield f"<h3>Output {safe(row.output)}</h3>"
        chart = histogram_chart(row, certificate.thresholds, f"cosines-{index}")
        yield _scrolling(f"Chart of the cosines of {row.output}", chart, kind="scroll from-end")
        worst = [[(f"{one.cosine:.6f}", True), (_shortened(one.text), False)] for one in row.worst_texts]
        yield _table(f"The texts with the lowest cosines of {row.output}", ["Cosine", "Text"], worst)


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
        yield _facts(_retrieval_facts(certificate.retrieval))


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


def _quantization(record: QuantizationRecord) -> Iterator[str]:
    num_high = sum(layer.is_high for layer in record.layers)
    yield "<h2>Quantization</h2>"
    yield _facts(
        [
            ("Format", record.format),
            ("Method", record.method),
            ("Calibration", record.calibration),
            ("Calibration texts", f"{record.num_texts:,} texts, {record.num_tokens:,} tokens"),
            ("SHA-256 of those texts", record.texts_sha256),
            ("Layers left high", f"{num_high} of {len(record.layers)}"),
        ]
    )
    if record.layers:
        yield "<h3>Sensitivity of the layers</h3>"
        yield (
            '<p class="quiet">What quantizing a layer does to its product on the calibration texts: root mean square '
            "of the difference, divided by that of the exact product. Hatched: left in the higher precision.</p>"
        )
        if len(record.layers) > MOST_LAYERS:
            yield f"<p>The {MOST_LAYERS} largest of {len(record.layers)}; certificate.json has all.</p>"
        yield _scrolling("Chart of the layers", layers_chart(record, "layers"))


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


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    cells = "\n".join(
        f'<tr><th scope="row">{safe(name)}</th><td><bdi>{safe(value)}</bdi></td></tr>' for name, value in rows
    )
    return f'<div class="scroll"><table class="facts">\n<tbody>\n{cells}\n</tbody>\n</table></div>'


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[_Cell]]) -> str:
    """The first column's cells name their rows where they are no numbers."""
    rows = list(rows)
    is_number = [all(row[column][1] for row in rows) for column in range(len(header))]
    head = "".join(
        f'<th scope="col"{_NUMBER if number else ""}>{safe(name)}</th>'
        for name, number in zip(header, is_number, strict=True)
    )
    body = "\n".join("<tr>" + "".join(_cells(row)) + "</tr>" for row in rows)
    table = (
        f"<table>\n<caption>{safe(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>"
    )
    return _scrolling(caption, table)


def _scrolling(label: str, content: str, kind: str = "scroll") -> str:
    """``content``, which may be wider than the page: it scrolls, by keyboard too."""
    return f'<div class="{kind}" role="group" aria-label="{safe(label)}" tabindex="0">{content}</div>'


def _cells(row: Sequence[_Cell]) -> Iterator[str]:
    for column, (value, is_number) in enumerate(row):
        if is_number:
            yield f"<td{_NUMBER}>{safe(value)}</td>"
        elif column == 0:
            yield f'<th scope="row">{safe(value)}</th>'
        else:
            yield f"<td><bdi>{safe(value)}</bdi></td>"


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else text[:_TEXT_CHARS] + " …"
