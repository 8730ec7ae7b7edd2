"""Parts of a model as data: embeddings, norms, attention, MLPs and experts, layers, and plain layers of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from bei.engine.grid_windows import Windows
from bei_build.spec.patches import PatchesSpec
from bei_build.spec.short_convolution import ShortConvolutionSpec

# Constants are those of torch's classes: the slope of ``leaky_relu`` is 0.01, the alpha of ``elu`` 1. ``gelu_10`` is
# ``gelu`` clipped to [-10, 10].
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


LayerPart = Literal["attention", "convolution", "cross_attention", "mlp", "layer_input"]


Pooling = Literal[
    "cls",
    "max",
    "mean",
    "mean_sqrt_len",
    "weighted_mean",
    "last",
    "sum",
    "last_marked",
    "first_marked",
    "largest_id",
    "attention",
]


# Pooling modes that a user may choose; of the others three are for models that mark a token (``ModelSpec``), and one
# has weights (``AttentionPoolSpec``).
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)[:-4]


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last axis.

    ``layer`` is LayerNorm (arXiv:1607.06450), with or without bias; ``rms`` is RMSNorm (arXiv:1910.07467), without
    bias. ``offset`` is added to the stored weight: Gemma stores w and multiplies by 1 + w. Without ``weight`` the
    normalized value is not multiplied (OLMo).
    """

    eps: float
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    offset: float = 0.0
    weight: bool = True


@dataclass(frozen=True)
class MaskDropoutSpec:
    """ESM's token dropout: rows of tokens ``token_id`` are zeros; all rows are multiplied by 1 - ``share``, and divided
    by the share of the sequence's tokens that have another id (training dropped ``share`` of the tokens)."""

    token_id: int
    share: float


@dataclass(frozen=True)
class EmbeddingsSpec:
    """Sum of word, learned position and token type rows, then a norm.

    ``max_positions`` is 0 where positions have no table (rotary or relative ones). The first ``position_offset`` rows
    of the checkpoint's table are never used (OPT); they are cut off at build time, so that positions start at 0 for
    every engine. ``uncounted_id`` (RoBERTa's padding): a token's position is the number of tokens up to and including
    it that have another id; tokens of this id have position 0. ``type_vocab_size`` is 0 where token types have no
    table. ``task_vocab_size``: rows of a table of task types, whose first row is added to every token (ERNIE; 0: no
    table). ``scale`` multiplies the word rows. A ``width`` other than the model's is projected after the norm
    (ELECTRA). With ``patches`` tokens are an image's, and there is no word table. ``reads_images``: rows of an image
    tower, as wide as the word rows, may stand in the place of scaled word rows. ``image_layers``: these have as many
    further parts, each of which is added to the states behind one of the first layers (DeepStack, arXiv:2406.04334).
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
    patches: PatchesSpec | None = None
    reads_images: bool = False
    image_layers: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of a text that the position table covers; 0 without a table."""
        return self.max_positions if self.uncounted_id is None else self.max_positions - 1


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (arXiv:2104.09864): halves of a head's first 2 * len(inv_freq) components rotate by position *
    inv_freq; cosine and sine are multiplied by ``factor`` (YaRN, arXiv:2309.00071).

    ``interleaved``: neighbouring components rotate together instead of halves (the graph reorders the rows of the query
    and key weights). Sequences of more than ``long_from`` tokens rotate by ``long_inv_freq`` instead (LongRoPE,
    arXiv:2402.13753). With ``grid`` tokens are an image's: the first ``num_leading`` do not rotate, and of the patches
    behind them, in so many rows and columns, the first half of ``inv_freq`` rotates by the row and the other by the
    column, each times ``grid_scale`` (EVA-02, arXiv:2303.11331), or, if ``centred``, by the place of the patch's middle
    between -1 and 1 (DINOv3, arXiv:2508.10104).

    With ``axes`` tokens have positions on three axes (``bei.engine.grid_positions``), and each of ``inv_freq`` rotates
    by that on one of them: 0 time, 1 rows, 2 columns. ``block_side``: tokens are patches of images of any size, in
    order of blocks of so many patches a side; None: they are texts', and images' among them. ``num_parts``: the
    components that rotate are so many parts of equal width, each of which rotates by halves of its own (Gemma 4's
    image tower, a part for each axis).
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    long_from: int = 0
    interleaved: bool = False
    grid: tuple[int, int] | None = None
    grid_scale: tuple[float, float] = (1.0, 1.0)
    num_leading: int = 1
    centred: bool = False
    axes: tuple[int, ...] = ()
    block_side: int | None = None
    num_parts: int = 1

    @property
    def rotary_dim(self) -> int:
        """Number of components of a head that rotate."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class RelativeBiasSpec:
    """A learned bias for each head and bucket of distances; one table for all layers (arXiv:1910.10683, section
    2.1)."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class DisentangledSpec:
    """DeBERTa's content-to-position and position-to-content scores (arXiv:2006.03654, section 3.1).

    Distances map to 2 * ``span`` rows of a table that all layers share; beyond ``span / 2`` to logarithmic buckets up
    to ``max_distance``, where ``buckets`` is set. ``share_keys``: the content's projections also project the table.
    ``key_bias``: the table's own key projection has a bias.
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

    ``scale`` multiplies the scores. With ``bias`` but without ``key_bias`` only query and value have one. With fewer
    ``num_kv_heads``, neighbouring query heads share keys and values (arXiv:2305.13245). ``window``: keys at most so
    many positions away are visible. ``qk_norm`` normalizes each head of query and key before the rotation; with
    ``qk_norm_joint`` all heads together. ``softcap`` c turns scores s into c * tanh(s / c) (Gemma 2, arXiv:2408.00118).
    ``alibi`` subtracts slope * distance from the scores (arXiv:2108.12409, symmetric). ``clip`` bounds the outputs of
    the projections (OLMo, arXiv:2402.00838). ``value_norm`` normalizes each head of the values (Gemma 4).
    ``image_windows``: patches attend only to those of their window of an image (Qwen2.5-VL).
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
    value_norm: NormSpec | None = None
    image_windows: Windows | None = None

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
    """A mixture of experts (arXiv:1701.06538): ``count`` MLPs; each token goes through ``top_k`` of them.

    A linear router scores them. The outputs of the best ``top_k`` are added, each times its share: the softmax over all
    scores, divided by the sum of the chosen ones if ``normalized``.
    """

    count: int
    top_k: int
    normalized: bool = False


@dataclass(frozen=True)
class MLPSpec:
    """``down(act(up(x)))``, or gated (arXiv:2002.05202) ``down(act(gate(x)) * up(x))``.

    ``bias``: up and gate have biases. ``inner_norm`` is in front of down. With ``experts`` there are several MLPs,
    without gates and ``bias``; ``down_bias`` is then one bias for all of them, added once. Their matrices are stacked,
    [count * intermediate_size, hidden_size]: up's as [out, in], down's as [in, out].
    """

    intermediate_size: int
    activation: Activation
    gated: bool = False
    bias: bool = True
    down_bias: bool = True
    experts: ExpertsSpec | None = None
    inner_norm: NormSpec | None = None


@dataclass(frozen=True)
class LayerInputSpec:
    """What a layer adds behind its MLP: output(activation(gate(h)) * e), e being a vector of ``width`` of the token for
    this layer alone (``LayerInputsSpec``)."""

    width: int
    activation: Activation


@dataclass(frozen=True)
class EntrySpec:
    """What becomes of the states before a layer reads them: they are normalized, as behind the last layer of a model,
    and a row of a table of ``num_types`` token types is added to each."""

    norm: NormSpec
    num_types: int


@dataclass(frozen=True)
class LayerSpec:
    """Attention, or a ``convolution`` in its place, then MLP, each with a residual sum.

    Placement of the norms: ``post``, after the sum (BERT); ``pre``, before attention and MLP (Llama); ``both``, before
    them and after them, inside the sum (Gemma 2); ``output``, only after them, inside the sum (OLMo 2). Without
    ``attention_norm`` the norm before the attention is missing (ModernBERT's first layer). ``parallel``: attention and
    MLP both read the output of one norm, and both are added to its input (GPT-J). ``second_attention_norm``: the
    layer's input is added once more after the attention's sum and norm, and normalized (JinaBERT's model for code).
    ``residual_scale`` multiplies the outputs of attention and MLP before the sum (Granite). ``cross_attention``: after
    the self-attention, with a sum and norm of its own, tokens attend to the encoder's last states of their sequence (a
    decoder's layer). ``layer_input``: after the MLP, with a sum and only the norm behind it. ``scaled``: the layer's
    last states are multiplied by a stored number. ``entry``: what is done first.
    """

    attention: AttentionSpec | None
    mlp: MLPSpec
    norm: NormSpec
    placement: Literal["post", "pre", "both", "output"] = "post"
    attention_norm: bool = True
    second_attention_norm: bool = False
    residual_scale: float = 1.0
    cross_attention: AttentionSpec | None = None
    parallel: bool = False
    convolution: ShortConvolutionSpec | None = None
    layer_input: LayerInputSpec | None = None
    scaled: bool = False
    entry: EntrySpec | None = None

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """What is added to the states, in order."""
        mixer: LayerPart = "convolution" if self.attention is None else "attention"
        cross: tuple[LayerPart, ...] = ("cross_attention",) if self.cross_attention else ()
        return (mixer, *cross, "mlp", *(("layer_input",) if self.layer_input else ()))

    @property
    def normed_parts(self) -> tuple[LayerPart, ...]:
        """The parts that have a norm of their own before them, or after their sum."""
        left_out = {self.parts[0]: not self.attention_norm, "mlp": self.parallel, "layer_input": True}
        return tuple(part for part in self.parts if self.placement != "output" and not left_out.get(part))

    def with_attention(self, **changes: Any) -> LayerSpec:
        """This layer with other values of its attention's fields."""
        assert self.attention is not None
        return replace(self, attention=replace(self.attention, **changes))

    @property
    def norms_input(self) -> bool:
        """True if norms precede attention and MLP."""
        return self.placement in ("pre", "both")

    @property
    def norms_output(self) -> bool:
        """True if norms follow attention and MLP, inside the sum."""
        return self.placement in ("both", "output")


@dataclass(frozen=True)
class LayerInputsSpec:
    """A vector of ``width`` of each token for each layer (Gemma 4's per-layer embeddings, without their table): one
    linear layer on the token's embedding, cut into as many parts as there are layers, each normalized."""

    width: int
    norm: NormSpec


@dataclass(frozen=True)
class ConvolutionSpec:
    """DeBERTa v2's convolution after the first layer: its states h become norm(h + activation(c)), where c is a
    convolution over the token embeddings with ``kernel_size`` neighbours, zeros beyond a sequence's ends."""

    kernel_size: int
    activation: Activation
    norm: NormSpec


@dataclass(frozen=True)
class DecoderSpec:
    """Decoder layers that read the encoder's text once more, shifted by one token (BART, arXiv:1910.13461, 3.2).

    ``embeddings`` shares the encoder's word table and has its own position and type tables. The shifted text starts
    with token ``start_id``. Where that is None, it starts with the text's n-th token, n being the number of its tokens
    other than ``padding_id``: its last token, unless padding is written in the text (mBART). The text's last token is
    not read.
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
    scores of two tokens are compared. ``factors``: the only row of a matrix that no file holds. ``residual``: the input
    is added to the activation's output, through the matrix ``{name}.residual.weight`` where the widths differ.
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
        """True if the residual goes through a matrix."""
        return self.residual and self.in_features != self.out_features


@dataclass(frozen=True)
class NormLayerSpec:
    """A norm of a head; its weights are ``{name}.weight`` and ``{name}.bias``."""

    name: str
    width: int
    norm: NormSpec


@dataclass(frozen=True)
class ActivationSpec:
    """An activation of a head, without a linear layer."""

    activation: Activation


@dataclass(frozen=True)
class NormalizeSpec:
    """L2 normalization inside a head. A final one is not in the graph: the runtime normalizes."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Every token attends to ``num_latents`` learned rows and goes through a gated MLP, each with a norm in front and a
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


@dataclass(frozen=True)
class AttentionPoolSpec:
    """Pooling "attention": a learned row, the probe, attends to a sequence's tokens, and goes through an MLP with a
    norm in front and a residual sum (arXiv:2106.04560, section 3.1: the MAP head of SigLIP, arXiv:2303.15343).

    ``gated``: the MLP has a gate. ``adds_first``: the sum's other part is the sequence's first state, not what the
    probe has attended to. Its weights are ``{name}.probe`` [1, 1, width] and those of ``input`` (query, key, value),
    ``output``, ``norm``, ``mlp.up``, ``mlp.gate`` and ``mlp.down``.
    """

    name: str
    width: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    norm: NormSpec
    gated: bool = False
    adds_first: bool = False
