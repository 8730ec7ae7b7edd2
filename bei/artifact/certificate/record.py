"""What a certificate says: how far a compiled engine is from its reference. ``bei.artifact.certificate`` makes the figures."""

from __future__ import annotations

from typing import Literal

import msgspec

# What an engine was compared with. Pending: with nothing yet, because it could not run where it was built; the answers
# to compare with are in the artifact.
Verification = Literal["reference", "self-consistency", "pending", "none"]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the cosines of every output must reach: their mean, their first percentile and the lowest.

    ``ndcg_loss``: the share of the reference's nDCG@10 that the engine may lose on the bundled retrieval set, beyond
    the loss's standard error; None where retrieval was not to be measured.
    """

    mean: float
    p1: float
    min: float
    ndcg_loss: float | None = None


class CosineHistogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many cosines lie where, by their distances 1 - cosine from 1.

    ``edges`` ascend. ``counts`` has one more: distances below ``edges[0]``, then those from ``edges[i - 1]`` up to
    ``edges[i]``, which is no longer in, and last those from ``edges[-1]`` on.
    """

    edges: list[float]
    counts: list[int]


class WorstText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A held-out text, and its cosine; of an output a token the lowest of its tokens'."""

    text: str
    cosine: float


class OutputAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output against the reference, in figures.

    Cosines are between engine and reference: of each text's vector (embeddings, sparse vectors), or of each token's.
    For scores of labels the mean is their correlation over all texts, and ``cosine_p1`` and ``cosine_min`` are over the
    shares that the texts have in it (docs/decisions.md). ``ranking_overlap`` is the mean share of each text's ten
    nearest neighbours, or of the ten texts that score highest for each label, that both agree on.

    What an output has no such figure for is None. ``spearman``: the rank correlation of the similarities of all pairs
    of vectors. ``kendall_tau``: tau-b of a reranker's scores. ``label_agreement``: the share of rows in which both
    score the same label highest. ``kl_divergence``: the mean, in nats, of the probabilities' divergence from the
    reference's; of the sigmoid the labels' are added.

    ``failures`` say which thresholds the output misses.
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
    failures: list[str]


class Agreement(OutputAgreement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with the histogram of its cosines, and the ten ``worst_texts``, the worst first."""

    histogram: CosineHistogram
    worst_texts: list[WorstText]


class RetrievalAgreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bundled retrieval set, ranked by ``output``: mean nDCG@10 of the reference and of the engine.

    ``loss`` is the share of the reference's nDCG that the engine lacks, negative where it has more; ``loss_error`` its
    standard error, by the differences of the queries. ``ndcg_chance`` is that of a random order. A reference that is
    less than halfway from there to 1 cannot rank these texts (it reads another language, say); then the order is
    chance, and no loss is a failure.
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
    """The artifact's tokenizer gave the ids and token types of ``tokenizer_class`` of the model's own ``library`` for
    ``num_texts`` texts and ``num_pairs`` pairs; a build in which one differs fails. ``sha256``: of the tokenizer.json
    that gave them."""

    library: str
    tokenizer_class: str
    num_texts: int
    num_pairs: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.num_texts} texts and {self.num_pairs} pairs as by {self.library} ({self.tokenizer_class})"


class LayerSensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What quantizing one linear layer does to its product, and to the model's outputs.

    ``error``: the fourth root of the mean of r^4 over tokens of the calibration, where r is
    |quantized product - exact product| / |exact product|. ``effect``: with this layer alone quantized, the sum over all
    outputs of |changed - exact|^2 / |exact|^2; None where it was not measured, as where nothing had to be left high.
    ``is_high``: the layer was left in the higher precision.
    """

    layer: str
    error: float
    is_high: bool
    effect: float | None = None

    @property
    def sensitivity(self) -> float:
        """By which layers are chosen to be left high."""
        return self.error if self.effect is None else self.effect


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine was quantized. ``calibration`` says in a sentence which texts it was calibrated on."""

    format: Literal["fp8", "int8"]
    method: str
    calibration: str
    num_texts: int
    num_tokens: int
    texts_sha256: str


class QuantizationRecord(Calibration, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with what quantizing does to each linear layer."""

    layers: list[LayerSensitivity]

    @property
    def by_sensitivity(self) -> list[LayerSensitivity]:
        """The layers, the most sensitive first."""
        return sorted(self.layers, key=lambda layer: -layer.sensitivity)

    @property
    def has_effects(self) -> bool:
        """Whether sensitivities are effects on the outputs, and not errors of products."""
        return any(layer.effect is not None for layer in self.layers)


class ReferenceComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine was compared with, where, and on how much (docs/architecture.md, a build's life).

    ``kind`` is "self-consistency" where the reference is bei's own FP32 engine, which shares the graph: what is wrong
    in both does not show. It is "none" where the build was told not to verify: nothing was compared, and nothing has
    passed. It is "pending" where the engine could not run at build time. ``reference_is_independent``: the reference is
    another implementation, asked or still to be compared with. ``device`` is where the engine answered.
    ``num_texts`` of the ``num_held_out_texts`` were compared; a time budget may leave some out. ``texts_sha256`` is
    over all of them, each with a line feed behind it.

    ``tokens`` is how the tokenizer was compared, which is done without the engine; None in fixtures of other checks.
    ``retrieval`` is None where it was not asked for, and where the time budget ended before it was measured: then
    ``thresholds`` has a value for it, and the verdict says so.
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
    """The compiled engine against the reference on held-out texts.

    ``canary_row`` is what the engine itself gave as ``canary_output`` for ``canary_text`` (vectors at unit length; of
    a token output the first token's), or the reference while the certificate is pending: readiness recomputes it. It
    shows that a server computes what was verified, not that this is right.
    """

    outputs: list[Agreement]
    quantization: QuantizationRecord | None = None
    canary_text: str
    canary_row: list[float]

    @property
    def failures(self) -> list[str]:
        """What misses its thresholds, an output or the retrieval each: ``embedding: mean cosine 0.98 below 0.99``."""
        rows = [(row.output, row.failures) for row in self.outputs]
        rows += [("retrieval", self.retrieval.failures)] if self.retrieval else []
        return [f"{name}: {', '.join(failures)}" for name, failures in rows if failures]

    @property
    def retrieval_is_missing(self) -> bool:
        """Whether retrieval was to be measured, and has not been."""
        return self.retrieval is None and self.thresholds is not None and self.thresholds.ndcg_loss is not None

    @property
    def verdict(self) -> str:
        """One line for people: ``passed on 101 texts``."""
        if self.kind == "none":
            return "NOT VERIFIED: built with --no-verify"
        if self.kind == "pending":
            return "PENDING: the engine could not run where it was built; 'bei verify' compares it on its own device"
        some = f"{self.num_texts} of {self.num_held_out_texts}"
        texts = f"{some if self.num_texts < self.num_held_out_texts else self.num_texts} texts"
        left_out = ", retrieval not measured" if self.retrieval_is_missing else ""
        return f"{'passed' if self.passed else 'BELOW THRESHOLD'} on {texts}{left_out}"
