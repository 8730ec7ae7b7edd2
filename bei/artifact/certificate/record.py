"""The certificate's data: the agreement of a compiled engine with its reference."""

from __future__ import annotations

from typing import Literal

import msgspec

from bei.artifact.certificate.reliability import ProbabilityCalibration

# The kind of comparison. Pending: not yet compared, because the engine could not run where it was built; the
# reference's answers are in the artifact.
Verification = Literal["reference", "self-consistency", "pending", "none"]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum values for every output: mean cosine, first percentile, lowest cosine.

    ``ndcg_loss``: the share of the reference's nDCG@10 on the bundled retrieval set that the engine may lose, beyond
    the loss's standard error; None: retrieval is not measured.
    """

    mean: float
    p1: float
    min: float
    ndcg_loss: float | None = None


class CosineHistogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A histogram of cosines by their distances from 1.

    ``edges`` ascend. ``counts`` has one entry more: distances below ``edges[0]``, then from ``edges[i - 1]`` up to but
    not including ``edges[i]``, and last those from ``edges[-1]`` on.
    """

    edges: list[float]
    counts: list[int]


class WorstText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A held-out text and its cosine; for a token output, the lowest of its tokens'."""

    text: str
    cosine: float


class OutputAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agreement of one output with the reference, in figures.

    Cosines compare engine and reference for each text's vector (embeddings, sparse vectors), or each token's. For
    scores of labels the mean is their correlation over all texts, and ``cosine_p1`` and ``cosine_min`` are over the
    texts' shares in it (docs/decisions.md). Where the sizes of vectors or scores differ more than their directions or
    order, the figures are of sizes (``bei.verification.comparison``). ``ranking_overlap``: mean share of each text's
    ten nearest neighbours, or of the ten texts that score highest for each label, on which both agree.

    Figures that do not apply to an output are None. ``spearman``: rank correlation of the similarities of all pairs of
    vectors. ``kendall_tau``: tau-b of a reranker's scores. ``label_agreement``: share of rows in which both score the
    same label highest. ``kl_divergence``: mean divergence of the probabilities from the reference's, in nats; with the
    sigmoid the labels' divergences are added. Of spans: ``score_difference``, the 99th percentile of the differences of
    scores; ``span_agreement``, the share of the spans found by either that both find, but for those near the threshold.
    Spans are judged by these two, other outputs by cosines.

    ``failures``: the thresholds that the output misses.
    """

    output: str
    cosine_mean: float
    cosine_p1: float
    cosine_min: float
    max_abs_difference: float
    ranking_overlap: float
    spearman: float | None = None
    kendall_tau: float | None = None
    label_agreement: float | None = None
    kl_divergence: float | None = None
    score_difference: float | None = None
    span_agreement: float | None = None
    failures: list[str]


class Agreement(OutputAgreement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one output, with the histogram of its cosines and the ten ``worst_texts``, the worst first."""

    histogram: CosineHistogram
    worst_texts: list[WorstText]


class RetrievalAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agreement on the bundled retrieval set, ranked by ``output``: mean nDCG@10 of the reference and of the engine.

    ``loss``: the share of the reference's nDCG that the engine loses, negative for a gain; ``loss_error``: its standard
    error over the queries. ``ndcg_chance``: nDCG of a random order. A reference less than halfway from there to 1
    cannot rank these texts (it may be made for another language): then the order is chance, and no loss is a failure.
    """

    output: str
    num_queries: int
    num_documents: int
    ndcg_chance: float
    ndcg_reference: float
    ndcg_engine: float
    loss: float
    loss_error: float
    is_judged: bool
    failures: list[str]


class TokenAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The comparison of the artifact's tokenizer with ``tokenizer_class`` of the model's own ``library``: equal ids and
    token types for ``num_texts`` texts and ``num_pairs`` pairs (a build with a difference fails). ``sha256``: of the
    tokenizer.json that was compared."""

    library: str
    tokenizer_class: str
    num_texts: int
    num_pairs: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.num_texts} texts and {self.num_pairs} pairs as by {self.library} ({self.tokenizer_class})"


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effect of quantizing one linear layer on its product, and on the model's outputs.

    ``error``: the fourth root of the mean of r^4 over the calibration's tokens, with r = |quantized product - exact
    product| / |exact product|. ``effect``: the sum over all outputs of |changed - exact|^2 / |exact|^2 with this layer
    alone quantized; None: not measured, as if no layer had to be left high. ``is_high``: the layer was left in the
    higher precision.
    """

    layer: str
    error: float
    is_high: bool
    effect: float | None = None

    @property
    def sensitivity(self) -> float:
        """The figure by which layers are chosen to be left in the higher precision."""
        return self.error if self.effect is None else self.effect


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantization of the engine. ``calibration``: a sentence about the calibration texts."""

    format: Literal["fp8", "int8"]
    method: str
    calibration: str
    num_texts: int
    num_tokens: int
    texts_sha256: str


class QuantizationRecord(Calibration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The calibration, with the effect of quantizing on each linear layer."""

    layers: list[LayerSensitivity]

    @property
    def by_sensitivity(self) -> list[LayerSensitivity]:
        """The layers, the most sensitive first."""
        return sorted(self.layers, key=lambda layer: -layer.sensitivity)

    @property
    def has_effects(self) -> bool:
        """True if sensitivities are effects on the outputs, False if they are errors of products."""
        return any(layer.effect is not None for layer in self.layers)


class ImageAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image tower's comparison with a reference on drawn images, which the reference read from their files by the
    model's own image processor. ``images_sha256``: of all files, one after the other. ``canary_row``: the engine's
    vector for the canary image, at unit length. ``worst_texts`` of the ``output`` are names of images."""

    kind: Verification
    reference: str
    reference_is_independent: bool
    device: str
    num_images: int
    images_sha256: str
    thresholds: Thresholds | None
    passed: bool
    canary_row: list[float]
    output: Agreement | None


class ReferenceComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's comparison with a reference: kind, device, texts, verdict (docs/architecture.md, "A build").

    ``kind``: "self-consistency" means that the reference is bei's own FP32 engine, which shares the graph, so that
    errors in both stay hidden; "none": the build skipped verification; "pending": the engine could not run at build
    time. ``reference_is_independent``: the reference is another implementation, already or still to be compared with.
    ``device``: where the engine ran. ``num_texts`` of the ``num_held_out_texts`` were compared; a time budget may leave
    some out. ``texts_sha256``: of all held-out texts, each followed by a line feed.

    ``tokens``: the comparison of the tokenizer, which does not need the engine; None in tests only. ``retrieval``: None
    if it was not requested, or the time budget ended before; in the latter case ``thresholds`` has a value for it, and
    the verdict says so.
    """

    kind: Verification
    reference: str
    reference_is_independent: bool
    device: str
    num_texts: int
    num_held_out_texts: int
    texts_sha256: str
    thresholds: Thresholds | None
    passed: bool
    retrieval: RetrievalAgreement | None = None
    tokens: TokenAgreement | None = None
    canary_output: str


class Certificate(ReferenceComparison, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agreement of a compiled engine with the reference on held-out texts.

    ``canary_row``: the engine's own ``canary_output`` for ``canary_text`` (vectors at unit length; of a token output
    the first token's row), or the reference's while the certificate is pending. Readiness recomputes it, which shows
    that a server computes what was verified, not that this is right. ``images``: of the image tower, where there is
    one; ``labels``: that of the tower of labels, whose texts stand for labels. Of a model that reads images alone all
    figures are there: it has no texts and ``outputs``, and ``canary_row`` is that of ``images``. ``probabilities``: of
    each temperature that ``bei calibrate`` has fitted.
    """

    outputs: list[Agreement]
    quantization: QuantizationRecord | None = None
    canary_text: str
    canary_row: list[float]
    images: ImageAgreement | msgspec.UnsetType = msgspec.UNSET
    labels: Certificate | msgspec.UnsetType = msgspec.UNSET
    probabilities: list[ProbabilityCalibration] | msgspec.UnsetType = msgspec.UNSET

    @property
    def failures(self) -> list[str]:
        """Missed thresholds of each output and of retrieval: ``embedding: mean cosine 0.98 below 0.99``."""
        rows = [(row.output, row.failures) for row in self.outputs]
        rows += [("retrieval", self.retrieval.failures)] if self.retrieval else []
        rows += [("images", self.images.output.failures)] if self.images and self.images.output else []
        found = [f"{name}: {', '.join(failures)}" for name, failures in rows if failures]
        return found + [f"labels: {failure}" for failure in (self.labels.failures if self.labels else ())]

    @property
    def retrieval_is_missing(self) -> bool:
        """True if retrieval was requested but not measured."""
        return self.retrieval is None and self.thresholds is not None and self.thresholds.ndcg_loss is not None

    @property
    def verdict(self) -> str:
        """The verdict in a line: ``passed on 101 texts``."""
        if self.kind == "none":
            return "NOT VERIFIED: built with --no-verify"
        if self.kind == "pending":
            return "PENDING: the engine could not run where it was built; 'bei verify' compares it on its own device"
        some = f"{self.num_texts} of {self.num_held_out_texts}"
        texts = f"{some if self.num_texts < self.num_held_out_texts else self.num_texts} texts"
        images = f"{self.images.num_images} images" if self.images else ""
        labels = f"{self.labels.num_texts} labels" if self.labels else ""
        inputs = " and ".join(filter(None, (texts if self.num_held_out_texts else "", images, labels)))
        left_out = ", retrieval not measured" if self.retrieval_is_missing else ""
        return f"{'passed' if self.passed else 'BELOW THRESHOLD'} on {inputs}{left_out}"
