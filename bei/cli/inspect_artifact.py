"""``bei inspect``: manifest and certificate, as a table or JSON.

The certificate alone: ``bei.cli.certificate``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bei.artifact.certificate.record import Agreement, Certificate
from bei.artifact.manifest import Artifact, Package, Plan, Tokenization
from bei.artifact.sides import Role
from bei.artifact.signature import ArtifactSignature
from bei.cli.console_text import console_text
from bei.printable import printable

_ASKED = " (as bei build --attention said)"


def as_json(artifact: Artifact) -> str:
    """Manifest, certificate and signature of the artifact as JSON."""
    signed = artifact.signed
    signature = signed and {"algorithm": signed.algorithm, "key": signed.key, "checked": signed.is_checked}
    content = {"manifest": artifact.manifest, "certificate": artifact.certificate, "signature": signature}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def as_table(artifact: Artifact) -> str:
    """Manifest, certificate and signature of the artifact as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in (_model_rows(artifact), _engine_rows(artifact), _certificate_rows(artifact)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return "\n".join(printable(line) for line in console_text(table).strip("\n").split("\n"))


def _model_rows(artifact: Artifact) -> list[tuple[str, str]]:
    manifest = artifact.manifest
    spec, embedding = manifest.spec, manifest.embedding
    revision = f" at {manifest.source.revision}" if manifest.source.revision else ""
    rows = [
        ("name", manifest.name),
        ("source", f"{manifest.source.model} ({manifest.source.kind}{revision})"),
        ("source sha256", manifest.source.sha256),
        ("read by", f"transformers {manifest.source.transformers}"),
        *([("tokenizer", _tokenizer(manifest.tokenization))] if manifest.tokenization else []),
        ("architecture", f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}"),
        ("parameters", f"{spec.num_parameters:,}"),
        *([("attention", spec.attention + _ASKED * spec.attention_asked)] if spec.attention else []),
        *([("adapter", spec.adapter)] if spec.adapter else []),
        *([("adapters", ", ".join(manifest.adapter_names))] if manifest.adapter_names else []),
        *((f"scale of {name}", str(scale)) for name, scale in (spec.adapter_scales or {}).items()),
        ("tasks", ", ".join(manifest.tasks)),
        ("outputs", ", ".join(f"{output.name} [{output.dimension}]" for output in manifest.outputs)),
    ]
    if embedding is not None:
        length = "unit length" if embedding.normalize else "as the model gives them"
        rows.append(("embeddings", f"{embedding.pooling} pooling, {length}"))
        if embedding.matryoshka_dimensions:
            rows.append(("dimensions", ", ".join(map(str, embedding.matryoshka_dimensions))))
    if manifest.classification is not None:
        rows.append(("labels", f"{', '.join(manifest.classification.labels)} ({manifest.classification.function})"))
    for task, temperature in (manifest.temperatures or {}).items():
        rows.append((f"temperature of {task}", f"{temperature:.4f}"))
    if manifest.rerank_template is not None:
        template = manifest.rerank_template
        rows.append(("rerank template", repr(template.prefix + template.body + template.suffix)))
    if asked := manifest.classify_template:
        rows.append(("classify template", repr(asked.prefix + asked.body + asked.suffix)))
    if decided := manifest.decide_template:
        rows.append(("decide template", repr(decided.body) + (f" + {decided.option!r}" if decided.option else "")))
    if (lists := manifest.listwise) is not msgspec.UNSET:
        most = f"{lists.max_query_tokens} tokens of a query, {lists.max_document_tokens} of a document"
        rows.append(("lists", f"up to {lists.max_documents} documents at once, {most}"))
    for name, prompt in manifest.prompts.items():
        mark = " (default)" if name == manifest.default_prompt_name else ""
        rows.append((f"prompt {name}{mark}", repr(prompt)))
    rows += [(f"{side} tokens", _role(role, manifest.max_seq_len)) for side, role in manifest.roles.items()]
    if manifest.routes is not None:
        absent = f"; not in this artifact: {', '.join(manifest.routes.absent)}" if manifest.routes.absent else ""
        rows.append(("route", f"{manifest.routes.default or 'none'} unless a request says it{absent}"))
    if (tower := manifest.image_tower) is not None:
        height, width = tower.image_size
        size = f"{width} x {height} pixels in {tower.num_tokens} tokens"
        reading = "read by the decoder" if tower.sequence else f"{tower.pooling} pooling"
        rows.append(("images", f"{tower.spec.num_parameters / 1e6:.1f} M parameters, {size}, {reading}"))
    if (labels := manifest.label_tower) is not None:
        size = f"{labels.spec.num_parameters / 1e6:.1f} M parameters of {labels.spec.architecture}"
        rows.append(("labels", f"{size}, up to {labels.max_seq_len} tokens, {labels.embedding.pooling} pooling"))
    return rows


def _tokenizer(tokenization: Tokenization) -> str:
    parts = [f"{tokenization.tokenizer_class}, by {tokenization.library}"]
    if tokenization.truncation_side == "left":
        parts.append("a text that is too long loses its beginning")
    if tokenization.splits_special_tokens:
        parts.append("special tokens of a text are split")
    if tokenization.filled_with is not None:
        parts.append(f"texts are filled up with token {tokenization.filled_with}")
    if tokenization.chars_per_token:
        parts.append(f"texts are cut to {tokenization.chars_per_token} characters for each token they may have")
    return "; ".join(parts)


def _role(role: Role, max_seq_len: int) -> str:
    parts = [f"up to {min(role.max_tokens or max_seq_len, max_seq_len)}"]
    if role.expansion is not None:
        seen = "" if role.expansion.attended else ", which no other token sees"
        parts.append(f"filled up to {role.expansion.num_tokens} with token {role.expansion.token_id}{seen}")
    if role.table:
        parts.append("sparse vectors from a table of weights")
    if role.skip_ids:
        parts.append(f"vectors of {len(role.skip_ids)} tokens left out")
    return "; ".join(parts)


def _engine_rows(artifact: Artifact) -> list[tuple[str, str]]:
    manifest = artifact.manifest
    size = sum(file.size for file in manifest.files)
    needs = ", ".join(manifest.engine.capabilities) or "nothing special"
    plan = [] if manifest.engine.plan is None else _plan_rows(manifest.engine.plan)
    package = [] if manifest.engine.package is None else _package_rows(manifest.engine.package)
    return [
        ("target", f"{manifest.target}, {manifest.precision}"),
        ("compiler", f"{manifest.engine.compiler} {manifest.engine.compiler_version}"),
        ("needs", f"{manifest.engine.device}: {needs}"),
        *plan,
        *package,
        ("max_num_tokens", str(manifest.max_num_tokens)),
        ("max_batch_size", str(manifest.max_batch_size)),
        ("max_seq_len", str(manifest.max_seq_len)),
        ("files", f"{len(manifest.files)}, {size / 1e6:.1f} MB, verified"),
        ("built by", f"bei {manifest.bei_version}, schema {manifest.schema_version}"),
        *_signature_rows(artifact.signed),
    ]


def _signature_rows(signed: ArtifactSignature | None) -> list[tuple[str, str]]:
    if signed is None:
        return [("signed by", "nobody")]
    unchecked = [] if signed.is_checked else [("signature", "NOT CHECKED: pip install 'bei[sign]'")]
    return [("signed by", f"{signed.key}, {signed.algorithm}"), *unchecked]


def _layers_row(kinds: Sequence[str]) -> tuple[str, str]:
    """The number of attention layers of each kind."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return "attention", ", ".join(f"{kind} ({count} layers)" for kind, count in counts.items()) or "none"


def _package_rows(package: Package) -> list[tuple[str, str]]:
    cuda = [] if package.cuda is None else [("CUDA", package.cuda)]
    weights = ("weights", f"{package.weight_bytes / 1e6:.1f} MB of the device's memory")
    return [*cuda, _layers_row(package.kernels), weights, *(("fallback", why) for why in package.fallbacks)]


def _plan_rows(plan: Plan) -> list[tuple[str, str]]:
    rows = [_layers_row(plan.lowerings)]
    for one in plan.profiles:
        most = f"up to {one.tokens[2]} tokens, {one.sequences[2]} sequences, {one.longest[2]} tokens of one"
        rows.append((f"profile {one.name}", most))
    rows += [("fallback", fallback) for fallback in plan.fallbacks]
    if plan.hardware_compatible:
        rows.append(("runs on", "every GPU from Ampere on"))
    if plan.refit:
        rows.append(("weights", "beside the plan, put into it when it is loaded"))
    return rows


def _certificate_rows(artifact: Artifact) -> list[tuple[str, str]]:
    tokens = artifact.certificate.tokens
    return [*([("token ids", f"the same for {tokens}")] if tokens else []), *_verified_rows(artifact)]


def _verified_rows(artifact: Artifact) -> list[tuple[str, str]]:
    certificate, thresholds = artifact.certificate, artifact.certificate.thresholds
    if thresholds is None:
        return [("certificate", certificate.verdict), ("canary", "as the engine answered at build time")]
    if certificate.kind == "pending":
        needed = f"mean {thresholds.mean}, p1 {thresholds.p1}, min {thresholds.min}"
        return [
            ("certificate", certificate.verdict),
            ("reference", f"{certificate.reference}; its answers are in the artifact"),
            ("needed cosines", needed),
            *_quantization_rows(certificate),
        ]
    own = "bei's own: " if certificate.kind == "self-consistency" else ""
    rows = [
        ("certificate", f"{certificate.kind}, {certificate.verdict}"),
        ("reference", f"{own}{certificate.reference}"),
        ("verified on", certificate.device),
        ("needed cosines", f"mean {thresholds.mean}, p1 {thresholds.p1}, min {thresholds.min}"),
        *_quantization_rows(certificate),
    ]
    for one in certificate.outputs:
        rows += [
            (one.output, f"mean {one.cosine_mean:.6f}, p1 {one.cosine_p1:.6f}, min {one.cosine_min:.6f}"),
            *(("FAILED", failure) for failure in one.failures),
            ("ranking kept", f"{one.ranking_overlap:.1%} of the ten best"),
            *(
                (name, f"{value:.5f}")
                for name, value in (
                    ("Spearman", one.spearman),
                    ("Kendall tau", one.kendall_tau),
                    ("same label", one.label_agreement),
                    ("KL divergence", one.kl_divergence),
                    ("Difference of scores", one.score_difference),
                    ("Same spans", one.span_agreement),
                )
                if value is not None
            ),
            ("largest difference", f"{one.max_abs_difference:.2e}"),
            ("worst text", f"{one.worst_texts[0].cosine:.6f}: {one.worst_texts[0].text[:70]!r}"),
        ]
    others: list[tuple[str, Agreement]] = []
    if certificate.images and certificate.images.output:
        others.append(("images", certificate.images.output))
    others += [("labels", one) for one in certificate.labels.outputs] if certificate.labels else []
    for name, of in others:
        rows.append((name, f"mean {of.cosine_mean:.6f}, p1 {of.cosine_p1:.6f}, min {of.cosine_min:.6f}"))
        rows += [("FAILED", failure) for failure in of.failures]
    if ranked := certificate.retrieval:
        rows.append(("nDCG@10", f"{ranked.ndcg_engine:.5f}, the reference's {ranked.ndcg_reference:.5f}"))
        rows += [("FAILED", failure) for failure in ranked.failures]
    elif certificate.retrieval_is_missing:
        rows.append(("nDCG@10", "not measured: the time for verifying was over"))
    return [*rows, ("more", "bei inspect --certificate, certificate.html")]


def _quantization_rows(certificate: Certificate) -> list[tuple[str, str]]:
    record = certificate.quantization
    if record is None:
        return []
    num_high = sum(layer.is_high for layer in record.layers)
    return [
        ("quantized", f"{record.format}, {record.method}; {num_high} of {len(record.layers)} layers not quantized"),
        ("calibrated on", f"{record.calibration} ({record.num_texts:,} texts, {record.num_tokens:,} tokens)"),
    ]
