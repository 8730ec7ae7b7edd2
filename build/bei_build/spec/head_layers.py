"""Layers of heads that score words, spans and tokens, and the kinds of layers that heads have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from bei.core import EXTRAS, record_columns
from bei_build.spec.parts import (
    Activation,
    ActivationSpec,
    DenseSpec,
    LatentAttentionSpec,
    NormalizeSpec,
    NormLayerSpec,
    Pooling,
)

Scorer: TypeAlias = Literal["dot", "weighted", "mlp"]
Counting: TypeAlias = Literal["mlp", "transformer"]


@dataclass(frozen=True)
class CountingSpec:
    """Labels of a schema, as its instances read them (GLiNER2, arXiv:2507.18546, its CountLSTM and CountLSTMv2).

    A GRU whose state is the label l makes a step to h_1, h_2, ... for each instance, with a row of ``position`` as its
    input. Then the label is projector([h, l]), an MLP of one hidden layer of 4 * width (``mlp``), or out([t, h + l])
    with t, the states of a small ``transformer`` over h + l of all labels of a part of the schema, and an MLP of two
    hidden layers.

    Each part has a token of its own, from whose state an MLP scores ``num_counts`` numbers of instances, from 0. They
    stand in columns of their own in front of those of the part's labels (``bei.engine.schema_columns``).

    Its weights are those of the head's ``schema``: ``position``, the GRU's ``gru.{input|hidden}`` (gates as PyTorch's
    GRU has them), ``count.{0|1}``, ``label.{i}``, and of the transformer ``narrow`` and
    ``blocks.{i}.{input|output|up|down|attention_norm|mlp_norm}``.
    """

    kind: Counting
    num_counts: int = 20
    # Of the transformer.
    num_layers: int = 2
    num_heads: int = 4
    inner_width: int = 128
    eps: float = 1e-5

    def label_widths(self, width: int) -> tuple[int, ...]:
        """Of the MLP ``label``: what enters, the hidden layers, and what leaves."""
        if self.kind == "mlp":
            return (2 * width, 4 * width, width)
        return (self.inner_width + width, width, width, width)


@dataclass(frozen=True)
class SpanScoresSpec:
    """Scores of all spans of up to ``max_width`` words for all labels of a sequence (GLiNER, arXiv:2311.08526, section
    2.2, with the span representation "markerV0" of its code).

    Words and labels are the tokens that the batch marks (``bei.engine.words``). ``recurrent_layers`` bidirectional
    LSTMs read the words first. With MLPs of one hidden layer of 4 * ``width`` and a ReLU, a span from word i to word j
    scores label c with out(relu([start(w_i), end(w_j)])) * label(l_c).

    With ``given_labels`` labels are no tokens, but vectors of ``width`` numbers that the batch brings. With ``linear``
    (the span representation "marker", of its first models) ``out`` is one linear layer, and the hidden layers of
    ``start`` and ``end`` have 2 * ``width``.

    Its weights are ``{name}.rnn.{i}.{ahead|back}.{input|hidden}`` (gates as PyTorch's LSTM has them), and two
    linear layers ``.0`` and ``.1`` of each MLP, ``{name}.{start|end|out|label}``.

    ``counting``: labels are a schema's (``CountingSpec``), in place of the MLP ``label``.
    """

    name: str
    width: int
    max_width: int
    recurrent_layers: int
    given_labels: bool = False
    counting: CountingSpec | None = None
    linear: bool = False

    @property
    def columns(self) -> int:
        """Scores of a word for one label."""
        return self.max_width

    @property
    def end_width(self) -> int:
        """Of the hidden layers of ``start`` and ``end``."""
        return (2 if self.linear else 4) * self.width


@dataclass(frozen=True)
class WordScoresSpec:
    """Scores of every word as the first of a span, its last, and one inside, for all labels of a sequence (the
    token-level models of GLiNER's code, its ``Scorer``).

    Words, labels (also given ones) and LSTMs are those of ``SpanScoresSpec``. Words and labels are projected to two
    rows of ``width`` each, a and b; the scores are out([a_word, a_label, b_word * b_label]), an MLP with one hidden
    layer of 4 * ``width`` and a ReLU.

    Its weights are those of the LSTMs, two linear layers ``{name}.{word|label}``, and ``.0`` and ``.1`` of
    ``{name}.out``.
    """

    name: str
    width: int
    recurrent_layers: int
    given_labels: bool = False

    @property
    def columns(self) -> int:
        """Scores of a word for one label."""
        return 3


@dataclass(frozen=True)
class RelationScoresSpec:
    """Scores of all pairs of a sequence's entities for all its labels (GLiREL, arXiv:2501.03172, with "markerv1" and
    the scorer "dot" of its code).

    Words and labels are the tokens that the batch marks (``bei.engine.words``), entities the words that it names
    (``bei.engine.entity_pairs``), up to ``max_entities``. States of tokens have ``state_width`` numbers; words and
    labels are projected to ``width``, where that is another one, and a word without tokens is a projected zero. A
    bidirectional LSTM reads the words. With MLPs of one hidden layer of 4 * ``width`` and a ReLU, an entity from word i
    to word j is e = out(relu([start(w_i), end(w_j)])), and a pair scores label c with pair([e_head, e_tail]) *
    label(l_c).

    ``averages_labels``: a label is the mean of its marked token and the one behind it.

    Its weights are those of the LSTM, as of ``SpanScoresSpec``, the linear layer ``{name}.projection``, and two linear
    layers ``.0`` and ``.1`` of each MLP, ``{name}.{start|end|out|pair|label}``.
    """

    name: str
    width: int
    state_width: int
    max_entities: int
    averages_labels: bool = False
    recurrent_layers: int = 1

    @property
    def columns(self) -> int:
        """Scores of an entity for one label."""
        return self.max_entities

    @property
    def is_projected(self) -> bool:
        """True if words and labels have another width than the states of tokens."""
        return self.state_width != self.width


@dataclass(frozen=True)
class BoundaryScoresSpec:
    """Scores of pairs of boundaries between words for all labels of a sequence (GLiNER2.5, the architecture "boundary"
    of gliner2's code with a shared pool of candidates).

    A boundary's state, of ``boundary_width`` numbers, is joined from the words on both sides (``bos`` and ``eos``
    outside of the text), then read by ``attention_layers`` (each pre-norm, of boundaries at most ``window`` away; 0:
    all) and ``refinement_layers`` (SwiGLU with ``inner_width`` numbers). Labels score every boundary as a start and as
    an end, and every word as one inside. The ``most`` starts and ends that any label scores highest are paired; a pair
    is a row of ``pair_width`` numbers, of both states, their compatibility, the length and, with a ``content_width``,
    the mean of the words between. A label's score of a pair is a product with its row, a small MLP on the row times and
    plus numbers of the label, and the scores of start, end and of the words inside.

    No pair is read for another, so which of them a text's pool of candidates holds is decided outside of the graph. The
    output is that of ``bei.engine.boundaries``.

    Its weights are the vectors ``{name}.{bos|eos}``, and with norms where they are called so: ``{name}.{left|right}``,
    ``{name}.joined``, ``{name}.norm``, ``{name}.attention.{i}.{norm|input|output}``,
    ``{name}.refinement.{i}.{norm|up|down}``, ``{name}.{start|end}.{boundary|label}``, ``{name}.inside.{word|label}``,
    ``{name}.absent``, ``{name}.pool.{start|end}``, ``{name}.pair.{start|end|length|prior|norm|label|film}``,
    ``{name}.pair.out.{0|1}``, ``{name}.content.{value|norm|out}``.
    """

    name: str
    width: int
    boundary_width: int
    pair_width: int
    content_width: int
    most: int
    attention_layers: int
    num_heads: int
    window: int
    refinement_layers: int
    inner_width: int
    eps: float = 1e-5
    film_width: int = 64

    @property
    def columns(self) -> int:
        """Numbers of a row for one label."""
        return self.most + EXTRAS


@dataclass(frozen=True)
class RecordStatesSpec:
    """What instances of structures are formed from (GLiNER2.5, the ``RecordHead`` of gliner2's code): of the states of
    ``boundaries``, whose head stands in front, and of labels the columns of ``bei.engine.record_columns``.

    A candidate is encoder([start, end]). As an instance it is instance(c), compared with others' fields as
    candidate(c), with those of label l as instance + field(l); seed(c) scores it as the seed of an instance. Each of
    ``num_queries`` learned ``queries`` q reads the values value(c) of all candidates, by the products of query(q) and
    key(c), which added to q are an instance, scored by ``object``. ``nothing`` stands for no value.

    Its weights are the linear layers ``{name}.{encoder|instance|field|candidate|query|key|value|object|seed}``, the
    vector ``{name}.nothing`` and ``{name}.queries``.
    """

    name: str
    width: int
    boundaries: BoundaryScoresSpec
    record_width: int
    num_queries: int

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return record_columns(self.record_width, self.num_queries)[1]


@dataclass(frozen=True)
class SpanPairScoresSpec:
    """Scores of pairs of spans, a head and a tail, for relations (GLiNER2.5, the ``SparseRelationScorer`` of gliner2's
    code). ``bei.engine.span_pairs`` names the pairs; a row holds the scores of ``most`` of them.

    A pair is the states of the first and last words of both, of the labels of both (their mean, unless
    ``joins_labels``), the direction from one to the other and the distance. An MLP with one hidden layer of ``width``
    numbers and a GELU scores it. ``reads_content``: to that are added sum(head(h) * sigmoid(gate(l)) * tail(t)) /
    sqrt(width) and content([head(h), tail(t), l]), with the means h and t of the words of both, and the labels l.

    Its weights are the linear layers ``{name}.mlp.{0|1}`` and ``{name}.{head|tail|gate|content}``.
    """

    name: str
    width: int
    most: int
    joins_labels: bool
    reads_content: bool

    @property
    def columns(self) -> int:
        """Scores of a row."""
        return self.most

    @property
    def label_width(self) -> int:
        """Numbers of a pair's labels."""
        return (1 + self.joins_labels) * self.width


@dataclass(frozen=True)
class LabelScoresSpec:
    """The score of every token, as the state of a label, for the text that it stands in (GLiClass, arXiv:2508.07662).

    The text's state is that of ``pooling``. Both sides go through two linear layers with ``activation`` between them,
    and with ``normalizes`` are divided by their lengths; text t and label l are then scored by

    - dot: t * l;
    - weighted: out([a_t, a_l, b_t * b_l]), of a linear layer from each side to two rows a and b;
    - mlp: out([t, l]).

    ``inner``: widths inside of ``out``, with a ReLU behind each. With ``normalizes`` the score is times
    ``{name}.scale``. The other weights are ``{name}.{text|label}.{0|1}``, of weighted ``{name}.{text|label}.rows``, and
    ``{name}.out.{i}``.
    """

    name: str
    width: int
    pooling: Pooling
    activation: Activation
    scorer: Scorer
    inner: tuple[int, ...] = ()
    normalizes: bool = False

    @property
    def columns(self) -> int:
        """Scores of a token."""
        return 1

    @property
    def entering(self) -> int:
        """Numbers that ``out`` reads."""
        return {"dot": 0, "weighted": 3 * self.width, "mlp": 2 * self.width}[self.scorer]


@dataclass(frozen=True)
class LikelihoodSpec:
    """The logarithm of every token's probability behind those in front of it, by a language model: of the softmax over
    the vocabulary of ``factor`` * matrix @ state, or of cap * tanh(that / cap).

    Tokens that are not scored (``bei.engine.scored``) have 0. Its weight is ``{name}.weight`` [vocabulary, width].
    """

    name: str
    width: int
    vocabulary: int
    factor: float = 1.0
    cap: float | None = None

    @property
    def columns(self) -> int:
        """Scores of a token."""
        return 1


@dataclass(frozen=True)
class JoinRowsSpec:
    """The rows of every ``count`` tokens that follow each other are joined to one."""

    count: int


@dataclass(frozen=True)
class MeanRowsSpec:
    """The mean of every ``count`` tokens that follow each other, computed in FP32. Tokens behind the last whole group
    are filler."""

    count: int


@dataclass(frozen=True)
class DivideRowsSpec:
    """Each row is divided into ``count`` ones, of as many tokens, with zeros behind a width that it does not divide."""

    count: int


@dataclass(frozen=True)
class JoinStatesSpec:
    """States behind other layers than the last are joined to the rows, as further columns (DeepStack,
    arXiv:2406.04334). ``taps``: of each the number of the layer, and what is computed of its states, before the last
    norm."""

    taps: tuple[tuple[int, tuple[HeadLayer, ...]], ...]


@dataclass(frozen=True)
class ScaledTanhSpec:
    """``beta * tanh(alpha * x + bias)`` (arXiv:2503.10622) with vectors ``{name}.alpha``, ``.beta`` and ``.bias``."""

    name: str
    width: int


HeadLayer: TypeAlias = (
    DenseSpec
    | NormLayerSpec
    | ActivationSpec
    | JoinRowsSpec
    | MeanRowsSpec
    | DivideRowsSpec
    | JoinStatesSpec
    | ScaledTanhSpec
    | NormalizeSpec
    | LatentAttentionSpec
    | SpanScoresSpec
    | WordScoresSpec
    | RelationScoresSpec
    | BoundaryScoresSpec
    | SpanPairScoresSpec
    | RecordStatesSpec
    | LikelihoodSpec
    | LabelScoresSpec
)


def needs_fp32(layer: HeadLayer) -> bool:
    """True if 16 bits are too narrow for ``layer`` on tokens, and so for the layers after it.

    A vector's length overflows FP16, and its lower bound underflows; SPLADE sums logarithms of numbers near 1.
    """
    return layer in (NormalizeSpec(), ActivationSpec("log1p_relu"))
