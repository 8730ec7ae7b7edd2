"""``Family``, the description of a model family, and helpers of family files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.errors import CheckpointError
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import Activation, ActivationSpec, DenseSpec, NormLayerSpec, NormSpec
from bei_build.spec.stored_forms import StoredForms

# transformers' ACT2FN names -> ours. "gelu" there is the exact form; of the tanh form there are five, which differ in
# rounding. Left out are those with parameters (prelu, xielu), and two from mechanisms that are not built (laplace,
# sqrtsoftplus).
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_10": "gelu_10",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "silu": "silu",
    "swish": "silu",
    "hardswish": "hardswish",
    "mish": "mish",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "identity",
}

# Makes the heads of one architecture from an HF config.
HeadsOf: TypeAlias = Callable[[Any], tuple[HeadSpec, ...]]

# The longest text of a model without a position limit.
UNLIMITED = 1_000_000

# Computes the values that a tensor must have from a spec and the stored tensor's shape.
Computed: TypeAlias = Callable[[ModelSpec, tuple[int, ...]], npt.NDArray[np.float32]]

# ``out_features`` of a layer whose width the config does not give: the number of rows of its stored matrix.
AS_STORED = 0


@dataclass(frozen=True)
class Family:
    """One HF config class.

    ``model_type`` is its name in transformers; ``aliases`` are model types of remote code. ``translate`` turns the
    config.json of remote code into one of the native class; it leaves native ones unchanged, and raises
    CheckpointError. ``architectures`` gives the heads of each class.

    ``weights`` maps our module names to the checkpoint's; ``{i}`` is the layer index; ``.weight`` and ``.bias`` are
    appended on both sides, unless our name has that ending already. A tuple lists alternatives: names of one tensor,
    which must be equal where several of them are stored. If several names of one layer have the same tensor, they are
    its rows, in the order of the table. Several layers may have the same tensor too: each reads all of it.
    ``joined_by_head``: the rows of a tensor that joins query, key and value are those of the first head's three, then
    those of the second head's, and so on. ``prefix``: the prefix that task classes put before the names of their base
    model. ``unused``: prefixes of tensor names (without ``prefix``) that may be left over: the reference class does not
    load them, or no built output depends on them. ``computed``: by the endings of their names, tensors that the class
    loads and bei computes; stored values are compared with the computed ones.

    ``reference_class`` names the transformers class for verification: it loads the checkpoint's backbone and its output
    has ``last_hidden_state`` (for T5 the encoder alone: "T5EncoderModel"; AutoModel would load the decoder too). A dot
    and the name of a submodule may follow. None: transformers has no such class, and engines are verified with bei's
    own FP32 engine. ``reference_names``: patterns of the checkpoint's names, and what they are called in this class.
    ``reference_heads``: its modules after the last states that are layers of bei's heads; the reference leaves them to
    these.
    ``position_limit``: the config's ``max_position_embeddings`` (or the position table) limits the length of a text.
    Without it the model has no limit, and ``usual_length`` is the number of tokens read where no file gives one.

    ``variant`` returns the family that reads a config.json in this one's place, if there is one: remote code can have
    several models under one name.

    ``remote_classes``: prefixes of class names in ``auto_map`` whose code reads config and tensors like this family.
    ``attention_keys``: keys of config.json that switch between causal and bidirectional attention; code under this
    family's native names is assumed to change nothing else (``remote_code``).

    ``score_factor``: a factor in the config by which a language model multiplies its token scores.

    ``asks_about_prompts``: some of these models leave a prompt out of the mean, and their files do not say so.

    Without ``special_tokens`` none are put around texts. Without ``pools_unknown`` means leave out the unknown token.
    ``stored_sizes``: no config gives the shape of the word table. ``shares_rows``: several tokens may have one row of
    it (``shared_rows``). ``fills_texts``: every text is filled up with padding to the model's limit, and padding is
    attended like any token. ``overflows_fp16``: states of trained models are beyond FP16. ``norm_offset``: the
    ``offset`` of all norms that have one; other forms of weights (GGUF, ONNX) store norms with it added.
    ``stored_forms``: tensors are not stored as specs read them.

    ``translate`` may add keys of ours to a config: ``usual_length``, the default for the tokens of a text that are read
    (None: all); ``unit_length``, true if vectors are normalized; ``cuts_chars``, true if texts are cut to the
    characters of so many usual tokens first; and ``ends_in_eos``, true if every text ends in the
    tokenizer's EOS, whatever the tokenizer's files contain.
    """

    model_type: str
    architectures: Mapping[str, HeadsOf]
    prefix: str
    weights: Mapping[str, str | tuple[str, ...]]
    unused: tuple[str, ...]
    spec_from_config: Callable[[Any, str], ModelSpec]
    computed: Mapping[str, Computed] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    remote_classes: tuple[str, ...] = ()
    attention_keys: tuple[str, ...] = ()
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    reference_class: str | None = "AutoModel"
    reference_names: Mapping[str, str] = field(default_factory=dict)
    reference_heads: tuple[str, ...] = ()
    position_limit: bool = True
    usual_length: int | None = None
    score_factor: Callable[[Any], float] = lambda config: 1.0
    asks_about_prompts: bool = False
    special_tokens: bool = True
    pools_unknown: bool = True
    stored_sizes: bool = False
    shares_rows: bool = False
    fills_texts: bool = False
    overflows_fp16: bool = False
    norm_offset: float = 0.0
    joined_by_head: bool = False
    variant: Callable[[Mapping[str, Any]], Family | None] | None = None
    stored_forms: StoredForms | None = None

    @property
    def is_decoder(self) -> bool:
        """True for language models, which predict tokens."""
        return "score" in self.weights

    @property
    def has_layers(self) -> bool:
        """False for static embeddings: a text's vector is the mean of its tokens' rows, whatever the user chooses."""
        return any(name.startswith("layers.") for name in self.weights)


def activation_named(name: object) -> Activation:
    """Our name for transformers' activation ``name``. Raises CheckpointError if there is none."""
    if isinstance(name, str) and name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise CheckpointError(f"Activation {name!r} is not supported. Supported: {', '.join(sorted(_ACTIVATIONS))}.")


def require(config: Any, key: str, *expected: object) -> None:
    """Refuse a config whose ``key`` (if present) has a value that the family does not describe."""
    value = getattr(config, key, expected[0])
    if value not in expected:
        raise CheckpointError(
            f"config.json has {key} = {value!r}; bei's {config.model_type} family supports only "
            f"{' or '.join(map(repr, expected))}."
        )


def positive_number(config: Any, key: str) -> float:
    """The number above 0 under ``key`` of the config. Raises CheckpointError."""
    value = getattr(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json has {key} = {value!r}: it must be a number above 0.")
    return float(value)


def padding_id(config: Any) -> int:
    """``pad_token_id`` of a config whose positions are counted from it. Raises CheckpointError if it is not in the
    vocabulary, or if the table has no position after it."""
    value, most = config.pad_token_id, min(config.vocab_size, config.max_position_embeddings - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
        raise CheckpointError(
            f"config.json has pad_token_id = {value!r}, from which {config.model_type} counts positions: it must be "
            f"the id of the tokenizer's padding token, from 0 to {most - 1}."
        )
    return value


def embedder(config: Any) -> tuple[HeadSpec, ...]:
    """The head of base models: an embedding. The sentence-transformers files or the user choose its pooling."""
    return (HeadSpec("embedding", ("mean",)),)


def classifier(*names: str, activation: Activation = "identity") -> HeadsOf:
    """Sequence classification: ``names`` are linear layers on the first state, ``activation`` between them."""

    def heads(config: Any) -> tuple[HeadSpec, ...]:
        width = config.hidden_size
        hidden = tuple(DenseSpec(name, width, width, activation=activation) for name in names[:-1])
        return (HeadSpec("logits", ("cls",), layers=(*hidden, DenseSpec(names[-1], width, config.num_labels))),)

    return heads


def token_classifier(name: str = "classifier", bias: bool = True) -> HeadsOf:
    """Token classification: one linear layer on every token's state."""

    def heads(config: Any) -> tuple[HeadSpec, ...]:
        layer = DenseSpec(name, config.hidden_size, config.num_labels, bias)
        return (HeadSpec("token_logits", token_layers=(layer,)),)

    return heads


def late_interaction(name: str) -> HeadsOf:
    """ColBERT (arXiv:2004.12832): a linear layer without bias on every token's state; its stored matrix gives its
    width."""

    def heads(config: Any) -> tuple[HeadSpec, ...]:
        layer = DenseSpec(name, config.hidden_size, AS_STORED, bias=False)
        return (HeadSpec("token_embedding", token_layers=(layer,)),)

    return heads


def masked_lm(
    norm: NormSpec | None = None, activation: Activation | None = None, width: Callable[[Any], int] | None = None
) -> HeadsOf:
    """A masked language model's scores for SPLADE: log(1 + relu(score)), the maximum over the tokens (arXiv:2109.10086,
    equation 1 with max pooling).

    Names: ``mlm.dense``, ``mlm.norm``, ``mlm.decoder``.
    """

    def heads(config: Any) -> tuple[HeadSpec, ...]:
        hidden = config.hidden_size
        inner = width(config) if width else hidden
        key = "activation" if hasattr(type(config), "activation") else "hidden_act"  # DistilBERT's, or all others'
        function = activation or activation_named(getattr(config, key))
        dense = DenseSpec("mlm.dense", hidden, inner, activation=function)
        layers = (
            dense,
            NormLayerSpec("mlm.norm", inner, norm or NormSpec(config.layer_norm_eps)),
            DenseSpec("mlm.decoder", inner, config.vocab_size),
        )
        return (HeadSpec("sparse", ("max",), token_layers=layers, layers=(ActivationSpec("log1p_relu"),)),)

    return heads
