"""Parts of a model as data: embeddings, norms, attention, MLPs and experts, layers, and the layers of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

# With the constants of torch's classes: the slope of ``leaky_relu`` is 0.01, the alpha of ``elu`` 1. ``gelu_10`` is
# ``gelu``, no less than -10 and no more than 10.
Activation = Literal[
    "gelu",
    "gelu_tanh",
    "gelu_10",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "leaky_relu",
    "elu",
    "silu",
    "hardswish",
    "mish",
    "tanh",
    "sigmoid",
    "log1p_relu",
    "identity",
]


Pooling = Literal[
    "cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last", "sum", "last_marked", "first_marked", "largest_id"
]


# What may be asked for: the last three are for models that mark a token (``ModelSpec``).
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)[:-3]


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last axis.

    ``layer`` is LayerNorm (arXiv:1607.06450), with or without bias; ``rms`` is RMSNorm (arXiv:1910.07467), without.
    ``offset`` is added to the stored weight: Gemma stores w where it multiplies by 1 + w. Without ``weight`` there is
    none, and nothing is multiplied (OLMo).
    """

    eps: float
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    offset: float = 0.0
    weight: bool = True


@dataclass(frozen=True)
class MaskDropoutSpec:
    """The rows of tokens ``token_id`` are zeros; all are multiplied by 1 - ``share``, and divided by the share of the
    sequence's tokens that are others (ESM, whose training dropped ``share`` of the tokens).
    """

    token_id: int
    share: float


@dataclass(frozen=True)
class EmbeddingsSpec:
    """Sum of word, learned position and token type rows, then a norm.

    ``max_positions`` is 0 where positions have no table (rotary or relative ones). ``position_offset`` rows of the
    checkpoint's table are never used (OPT) and are cut off at build time, so that positions start at 0 for every
    engine. ``uncounted_id``: a token's row is how many of its sequence, up to itself, are not of this id, and row 0 of
    a token that is (RoBERTa's padding). ``type_vocab_size`` is 0 where token types have no table.
    ``task_vocab_size``: of a table of so many kinds of tasks the first row is added everywhere (ERNIE; 0: no table).
    ``scale`` multiplies the rows of words. A ``width`` other than the model's is projected behind the norm (ELECTRA).
    """

    vocab_size: int
    max_positions: int = 0
    position_offset: int = 0
    uncounted_id: int | None = None
    type_vocab_size: int = 0
    task_vocab_size: int = 0
    norm: NormSpec | None = None
    scale: float = 1.0
    width: int | None = None
    mask_dropout: MaskDropoutSpec | None = None

    @property
    def longest(self) -> int:
        """How many tokens of a text the table of positions is for; 0 without a table."""
        return self.max_positions if self.uncounted_id is None else self.max_positions - 1


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (arXiv:2104.09864): halves of a head's first 2 * len(inv_freq) components turn by
    position * inv_freq; cosine and sine are multiplied by ``factor`` (YaRN, arXiv:2309.00071).

    ``interleaved``: not halves turn together, but neighbours (the rows of the query's and key's weights are put in
    order for it). A sequence of more than ``long_from`` tokens turns by ``long_inv_freq`` instead (LongRoPE,
    arXiv:2402.13753).
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    long_from: int = 0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many components of a head turn."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class RelativeBiasSpec:
    """A learned bias a head and bucket of distances, one table for all layers (arXiv:1910.10683, section 2.1)."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class DisentangledSpec:
    """DeBERTa's content-to-position and position-to-content scores (arXiv:2006.03654, section 3.1).

    Distances fall into 2 * ``span`` rows of a table that all layers share, beyond ``span / 2`` in logarithmic buckets
    up to ``max_distance`` where ``buckets`` is set. ``share_keys``: the table goes through the content's projections.
    ``key_bias``: that of the table's own projection to keys.
    """

    span: int
    buckets: bool
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    share_keys: bool
    norm: NormSpec | None
    key_bias: bool = True


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention, bidirectional unless ``causal``.

    ``scale`` multiplies the scores. Without ``key_bias`` only query and value have one where ``bias`` is set. With
    fewer ``num_kv_heads`` neighbouring query heads share keys and values (arXiv:2305.13245). A token sees keys at most
    ``window`` positions away. ``qk_norm`` is over each head of query and key, before the rotation; over all heads
    together if ``qk_norm_joint``. ``softcap`` c turns scores s into c * tanh(s / c) (Gemma 2, arXiv:2408.00118).
    ``alibi`` subtracts slope * distance from the scores (arXiv:2108.12409, symmetric).
    ``clip`` bounds what the projections give (OLMo, arXiv:2402.00838).
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    scale: float
    bias: bool = True
    key_bias: bool = True
    output_bias: bool = True
    causal: bool = False
    window: int | None = None
    rope: RopeSpec | None = None
    qk_norm: NormSpec | None = None
    qk_norm_joint: bool = False
    softcap: float | None = None
    alibi: bool = False
    relative_bias: RelativeBiasSpec | None = None
    disentangled: DisentangledSpec | None = None
    clip: float | None = None

    @property
    def width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:1701.06538): ``count`` MLPs, of which each token goes through ``top_k``.

    A linear router scores them. The outputs of the best ``top_k`` are added, each times its share: the softmax of all
    scores, divided by the sum of those chosen if ``normalized``.
    """

    count: int
    top_k: int
    normalized: bool = False


@dataclass(frozen=True)
class MLPSpec:
    """``down(act(up(x)))``, or gated (arXiv:2002.05202) ``down(act(gate(x)) * up(x))``.

    ``bias`` is that of up and gate. With ``experts`` there are several, without gates and ``bias``; ``down_bias`` is
    one for all of them, added once. Their matrices lie one below the other, [count * intermediate_size, hidden_size]:
    up's as [out, in], down's as [in, out].
    """

    intermediate_size: int
    activation: Activation
    gated: bool = False
    bias: bool = True
    down_bias: bool = True
    experts: ExpertsSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Attention then MLP, each with a residual sum.

    Where the norms are: ``post``, behind the sum (BERT); ``pre``, in front of attention and MLP (Llama); ``both``, in
    front of them and behind them, inside the sum (Gemma 2); ``output``, behind them only, inside the sum (OLMo 2).
    Without ``attention_norm`` the one in front of the attention is missing (ModernBERT's first layer).
    ``parallel``: attention and MLP read the output of one norm side by side, and both are added to its input (GPT-J).
    ``second_attention_norm``: what comes out of attention, sum and norm is added to the layer's input once more, and
    normalized (JinaBERT's model for code). ``residual_scale`` multiplies what attention and MLP add to the sum
    (Granite). ``cross_attention``: behind the attention, with a sum and norm of its own, tokens look at the encoder's
    last states of their sequence (a decoder's layer).
    """

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    placement: Literal["post", "pre", "both", "output"] = "post"
    attention_norm: bool = True
    second_attention_norm: bool = False
    residual_scale: float = 1.0
    cross_attention: AttentionSpec | None = None
    parallel: bool = False

    @property
    def norms_input(self) -> bool:
        """Whether attention and MLP have norms in front of them."""
        return self.placement in ("pre", "both")

    @property
    def norms_output(self) -> bool:
        """Whether attention and MLP have norms behind them, inside the sum."""
        return self.placement in ("both", "output")


@dataclass(frozen=True)
class ConvolutionSpec:
    """Behind the first layer: its states h become norm(h + activation(c)), where c is a convolution over the tokens'
    embeddings, of ``kernel_size`` neighbours, zeros beyond a sequence's ends (DeBERTa v2).
    """

    kernel_size: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True)
class DecoderSpec:
    """Layers behind an encoder's that read the same text once more, moved by one token (BART, arXiv:1910.13461, 3.2).

    ``embeddings`` has the encoder's table of words, and its own of everything else. In front of the text comes the
    token ``start_id``. Where that is None, it is the text's n-th token, n of its tokens not being ``padding_id``: its
    last, unless padding is written in it (mBART). The last token is not read.
    """

    embeddings: EmbeddingsSpec
    layers: tuple[LayerSpec, ...]
    start_id: int | None
    padding_id: int | None = None
    final_norm: NormSpec | None = None


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer of a head; its weights are ``{name}.weight`` and ``{name}.bias``.

    ``rows``: each row is a sum of rows of the stored matrix, given as (index, factor), as when a language model's
    scores of two tokens are compared. ``factors``: the one row of a matrix that no file holds. ``residual``: the input
    is added to what the activation gives, through the matrix ``{name}.residual.weight`` where the widths differ.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "identity"
    rows: tuple[tuple[tuple[int, float], ...], ...] | None = None
    factors: tuple[float, ...] | None = None
    residual: bool = False

    @property
    def projects_residual(self) -> bool:
        """Whether what is added goes through a matrix."""
        return self.residual and self.in_features != self.out_features


@dataclass(frozen=True)
class NormLayerSpec:
    """A norm of a head; its weights are ``{name}.weight`` and ``{name}.bias``."""

    name: str
    width: int
    norm: NormSpec


@dataclass(frozen=True)
class ActivationSpec:
    """An activation of a head, by itself."""

    activation: Activation


@dataclass(frozen=True)
class NormalizeSpec:
    """L2 normalization inside a head. A final one is not in the graph: the runtime normalizes."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Every token looks at ``num_latents`` learned rows and goes through a gated MLP, each with a norm in front and a
    residual sum (NV-Embed, arXiv:2405.17428, section 3.1).

    Its weights are ``{name}.latents.weight`` and those of ``norm``, ``latents_norm``, ``query``, ``key_value`` (keys,
    then values), ``output``, ``mlp_norm``, ``mlp.up`` (inputs, then gates) and ``mlp.down``.
    """

    name: str
    width: int
    num_latents: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    norm: NormSpec


HeadLayer: TypeAlias = DenseSpec | NormLayerSpec | ActivationSpec | NormalizeSpec | LatentAttentionSpec


def needs_fp32(layer: HeadLayer) -> bool:
    """Whether 16 bits are too narrow for ``layer`` on tokens and for the layers behind it.

    A length overflows FP16 and its floor vanishes in it; SPLADE sums logarithms of numbers near 1.
    """
    return layer in (NormalizeSpec(), ActivationSpec("log1p_relu"))
