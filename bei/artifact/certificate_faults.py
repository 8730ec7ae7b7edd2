"""Validates the values of a certificate, and that it is of its manifest, before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import LABEL_TOKENIZER, TOKENIZER, Manifest
from bei.artifact.reading_faults import MOST_COUNT, repeated, shown

_ROUNDING = 1e-4  # tolerance for cosines
# Of a model that reads images alone these are those of images.
SHARED_WITH_IMAGES = ("kind", "reference", "reference_is_independent", "device", "thresholds", "passed", "canary_row")


def certificate_fault(manifest: Manifest, certificate: Certificate) -> str | None:
    """The first fault of the ``certificate`` of ``manifest``, or None."""
    parts = (_tokens, _verdict, _figures, _image_figures, _label_figures)
    found = chain.from_iterable(part(manifest, certificate) for part in parts)
    return next(found, None)


def _tokens(manifest: Manifest, certificate: Certificate, path: str = TOKENIZER) -> Iterator[str]:
    tokenizer = next((info.sha256 for info in manifest.files if info.path == path), None)
    if certificate.tokens is not None and certificate.tokens.sha256 != tokenizer:
        yield f"the certificate's token ids were those of another {path}"


def _verdict(manifest: Manifest, certificate: Certificate) -> Iterator[str]:
    kind, outputs = certificate.kind, certificate.outputs
    if kind != manifest.verification:
        yield f"its kind is {kind}, and the manifest says {manifest.verification}"
    if not 0 <= certificate.num_texts <= certificate.num_held_out_texts <= MOST_COUNT:
        counts = f"{shown(certificate.num_texts)} of {shown(certificate.num_held_out_texts)}"
        yield f"it compares {counts} texts, which is not possible"
    was_compared = kind in ("reference", "self-consistency")
    texts_are_missing = manifest.reads_texts and not (certificate.num_texts and outputs)
    if was_compared and (texts_are_missing or certificate.thresholds is None):
        yield f"its kind is {kind}, but it lacks texts, outputs or thresholds"
    if certificate.passed != (was_compared and not certificate.failures):
        yield f"passed is {str(certificate.passed).lower()}, which its figures contradict"


def _figures(manifest: Manifest, certificate: Certificate) -> Iterator[str]:
    """Faults of cosines and thresholds; NaN and Inf are no JSON numbers, and were refused before."""
    thresholds = certificate.thresholds
    if thresholds is not None:
        for field in ("mean", "p1", "min"):
            if not -1 <= (value := getattr(thresholds, field)) <= 1:
                yield f"the threshold {field} is {value}, which is no cosine"
    yield from repeated("its outputs", [one.output for one in certificate.outputs])
    for one in certificate.outputs:
        if manifest.dimension(one.output) is None:
            yield f"it has figures for {shown(one.output)}, which the engine does not give"
        for field in ("cosine_mean", "cosine_p1", "cosine_min"):
            if not abs(value := getattr(one, field)) <= 1 + _ROUNDING:
                yield f"{field} of {one.output} is {value}, which is no cosine"
        if not 0 <= one.ranking_overlap <= 1 or not one.max_abs_difference >= 0:
            yield f"{one.output} has an invalid ranking_overlap or max_abs_difference"
        if not one.worst_texts:
            yield f"{one.output} has no worst_texts"
    width = manifest.dimension(certificate.canary_output)
    if width is None:
        yield f"its canary is for {shown(certificate.canary_output)}, which the engine does not give"
    elif len(certificate.canary_row) != width * _canary_blocks(manifest, certificate.canary_output):
        yield f"its canary has {len(certificate.canary_row)} components, and {certificate.canary_output} has {width}"


def _canary_blocks(manifest: Manifest, output: str) -> int:
    """Blocks of a row for the canary's one label (``bei.engine.boundaries``)."""
    return 2 if output == "span_logits" and manifest.extraction and manifest.extraction.candidates else 1


def _image_figures(manifest: Manifest, certificate: Certificate) -> Iterator[str]:
    found, tower = certificate.images or None, manifest.image_tower
    if (found is None) != (tower is None):
        yield "the certificate and the manifest disagree whether the model reads images"
    if found is None:
        return
    if not 0 <= found.num_images <= MOST_COUNT:
        yield f"it compares {shown(found.num_images)} images, which is not possible"
    was_compared = found.kind in ("reference", "self-consistency")
    if found.kind == "pending" or was_compared != (found.output is not None):
        yield f"its kind of images is {found.kind}, which its figures contradict"
    if found.passed != (found.output is not None and not found.output.failures):
        yield f"images.passed is {str(found.passed).lower()}, which its figures contradict"
    if found.output is not None:
        for field in ("cosine_mean", "cosine_p1", "cosine_min"):
            if not abs(value := getattr(found.output, field)) <= 1 + _ROUNDING:
                yield f"{field} of images is {value}, which is no cosine"
        if not found.output.worst_texts:
            yield "the output of images has no worst_texts"
    scores = "rerank" in manifest.tasks
    output = "logits" if scores else "token_embedding" if manifest.reads_images_by_token else "embedding"
    if len(found.canary_row) != manifest.dimension(output):
        yield f"the canary of images has {len(found.canary_row)} components"
    if not manifest.reads_texts and (
        certificate.outputs
        or certificate.num_held_out_texts
        or any(getattr(certificate, field) != getattr(found, field) for field in SHARED_WITH_IMAGES)
    ):
        yield "it differs from its images, which are all that the model reads"


def _label_figures(manifest: Manifest, certificate: Certificate) -> Iterator[str]:
    found = certificate.labels or None
    if (found is None) != (manifest.label_tower is None):
        yield "the certificate and the manifest disagree whether labels have a tower"
    if found is None or manifest.label_tower is None:
        return
    own = manifest.of_second
    faults = chain(_tokens(own, found, LABEL_TOKENIZER), _verdict(own, found), _figures(own, found))
    yield from (f"labels: {fault}" for fault in faults)
    if found.images or found.labels:
        yield "labels: they have no further tower"
