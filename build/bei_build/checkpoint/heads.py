"""Choice of a checkpoint's heads: by its class, its sentence-transformers files and the user, in rising priority."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from bei.core import ScoreFunction
from bei.errors import CheckpointError, ConfigError
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles, SparsePooling, torch_class
from bei_build.families.base import Family
from bei_build.spec.head_layers import LikelihoodSpec
from bei_build.spec.model_spec import HeadSpec, ModelSpec, Output
from bei_build.spec.parts import ActivationSpec, DenseSpec, NormLayerSpec, Pooling
from bei_build.weights.model_weights import SideModule, stored_width

TASKS = (
    "auto",
    "embed",
    "embed_sparse",
    "embed_tokens",
    "classify",
    "rerank",
    "classify_tokens",
    "extract",
    "decide",
    "zero_shot",
)

# Files beside the weights that hold one linear layer for every token: layer, and file without .pt -> output. BGE-M3
# (arXiv:2402.03216) has both; dense embedding, lexical weights and token vectors then come from one pass.
_TOKEN_FILES: dict[str, Output] = {"sparse_linear": "token_weights", "colbert_linear": "token_embedding"}

_TASKS_OF: dict[Output, tuple[str, ...]] = {
    "embedding": ("embed",),
    "sparse": ("embed_sparse",),
    "token_weights": ("embed_sparse",),
    "token_embedding": ("embed_tokens",),
    "token_logits": ("classify_tokens",),
    "token_projection": ("rerank",),
    "span_logits": ("extract",),
    "token_likelihood": ("decide",),
    "label_logits": ("zero_shot",),
    "option_logits": ("decide",),
    "relation_logits": ("extract",),
    "record_states": ("extract",),
}

# Activations that sentence-transformers' CrossEncoder applies to its scores: torch's class -> ours. One label has no
# softmax.
_CROSS_ENCODER_FUNCTIONS: dict[str, ScoreFunction] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "ReLU": "relu",
    "Softplus": "softplus",
}
_PROBLEM_FUNCTIONS: dict[str, ScoreFunction] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
}


# Factors of two labels' scores where the first, or the second, is the relevant one.
_PREFERENCES = ((1.0, -1.0), (-1.0, 1.0))


@dataclass(frozen=True)
class HeadChoice:
    """The user's choice of heads.

    ``score_tokens``: the language model's token whose score is the output, (yes,), two to compare, (no, yes), or of
    more each one; ``score_labels``: what they say, of two what the last one says. For decisions each has a score;
    without any, texts have their likelihoods.
    ``token_states``: add every token's state to an embedding. ``include_prompt``: the prompt's tokens count in the
    mean. ``relevant_label``: the label of a classifier with two that means relevant to a reranker.
    """

    task: str = "auto"
    pooling: Pooling | None = None
    score_tokens: tuple[str, ...] = ()
    token_states: bool = False
    include_prompt: bool | None = None
    relevant_label: str | None = None
    score_labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labels:
    """Meaning of the columns of ``logits`` or ``token_logits``, and the function that turns them into scores."""

    names: tuple[str, ...]
    function: ScoreFunction


@contextmanager
def reading_config() -> Iterator[None]:
    """Raise CheckpointError where a family's code fails: transformers checks the types of the values that it knows, not
    of a family's own, nor that they describe a model."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json describes no model ({error}). Download the checkpoint again.") from error


def choose_heads(
    family: Family,
    config: Any,
    architecture: str,
    files: SentenceTransformersFiles,
    choice: HeadChoice,
    tokenizer: Tokenizer,
) -> tuple[HeadSpec, ...]:
    """The heads to build; for a named task only the heads that serve it. Raises CheckpointError, ConfigError."""
    with reading_config():
        own = family.architectures[architecture](config)
    heads = _all_heads(family, config, own, files, choice, tokenizer)
    if choice.task == "decide" and not choice.token_states:
        return heads
    if choice.task == "rerank":
        heads = _as_scorer(heads, config, files, choice.relevant_label)
    tasks = {task: None for head in heads for task in tasks_of(head, config.hidden_size)}
    if choice.task not in ("auto", *tasks):
        raise ConfigError(
            f"{architecture} has no head for the task {choice.task}: choose one that it has, {' or '.join(tasks)}, "
            "or another checkpoint."
        )
    if choice.task != "auto":
        heads = tuple(head for head in heads if choice.task in tasks_of(head, config.hidden_size))
    if choice.token_states:
        heads = (*heads, _token_states(heads))
    _check_widths(heads, config.hidden_size)
    return heads


def tasks_of(head: HeadSpec, hidden_size: int) -> tuple[str, ...]:
    """Tasks that a served ``head`` supports. A classifier with one label is a scorer: it reranks."""
    if head.output == "logits":
        return ("rerank", "classify") if head.dimension(hidden_size) == 1 else ("classify",)
    return _TASKS_OF[head.output]


def labels_of(
    spec: ModelSpec,
    config: Any,
    files: SentenceTransformersFiles | None = None,
    choice: HeadChoice | None = None,
) -> Labels | None:
    """The labels of a classifier, and its function; ``files`` may name a CrossEncoder's function, and ``choice`` tokens
    of a language model as labels.

    For a reranker with two labels: only the relevant one, and its softmax share. Raises CheckpointError for an
    unsupported function, ConfigError for tokens with one name.
    """
    head = spec.head("logits") or spec.head("token_logits")
    if head is None:
        return None
    count = head.dimension(spec.hidden_size)
    if choice is not None and choice.score_tokens and choice.task in ("classify", "decide"):
        return Labels(_token_labels(choice, count), "sigmoid" if count == 1 else "softmax")
    if head.output == "token_logits":
        return Labels(_label_names(config, count), "softmax")
    if (preferred := _preferred(head)) is not None:
        return Labels((_label_names(config, 2)[preferred],), "sigmoid")
    return Labels(_label_names(config, count), _function(config, files, count))


def _token_labels(choice: HeadChoice, count: int) -> tuple[str, ...]:
    """The names of a classifier by tokens; without ``score_labels`` the tokens, less the mark of a space."""
    names = choice.score_labels or tuple(token.strip("Ġ▁ ") for token in choice.score_tokens[-count:])
    if len(set(names)) < count or "" in names:
        raise ConfigError(f"Labels must differ, and these are {', '.join(names)}: name each one with score_labels.")
    return names


def _label_names(config: Any, count: int) -> tuple[str, ...]:
    named = {int(key): str(value) for key, value in (getattr(config, "id2label", None) or {}).items()}
    return tuple(named.get(index, f"LABEL_{index}") for index in range(count))


def _function(config: Any, files: SentenceTransformersFiles | None, count: int) -> ScoreFunction:
    """The first of: ``function_to_apply`` of the config, a CrossEncoder's function, the function for ``problem_type``,
    the sigmoid for one label or the softmax for several. A CrossEncoder's Identity with several labels is ignored: it
    is the library's default. For one label the softmax, which would be 1 for all texts, is the sigmoid, as in
    transformers."""
    found = _asked_function(config) or _own_function(config, files, count)
    return "sigmoid" if count == 1 and found == "softmax" else found


def _own_function(config: Any, files: SentenceTransformersFiles | None, count: int) -> ScoreFunction:
    own = _cross_encoder_function(config, files, count)
    if own is not None and (count == 1 or own != "none"):
        return own
    return _PROBLEM_FUNCTIONS.get(getattr(config, "problem_type", None) or "", "softmax")


def _asked_function(config: Any) -> ScoreFunction | None:
    function = getattr(config, "function_to_apply", None)
    if function not in (None, "sigmoid", "softmax", "none"):
        raise CheckpointError(f"config.json has function_to_apply {function!r}; supported: sigmoid, softmax, none.")
    chosen: ScoreFunction | None = function
    return chosen


def _cross_encoder_function(config: Any, files: SentenceTransformersFiles | None, count: int) -> ScoreFunction | None:
    """The function that sentence-transformers' CrossEncoder applies to ``count`` scores; None: it is not specified.

    The name is in a file of sentence-transformers, in its key of the config, or in the key that was used before version
    4. If all are missing, a Dense module's only score gets a sigmoid, and several get none. Raises CheckpointError for
    an unsupported function.
    """
    nested = getattr(config, "sentence_transformers", None)
    said = nested.get("activation_fn") if isinstance(nested, dict) else None
    said = said or getattr(config, "sbert_ce_default_activation_function", None)
    activation = (files and files.activation) or said
    if activation is None and files and files.gives_scores:
        return "sigmoid" if count == 1 else "none"
    if activation is None:
        return None
    function = _CROSS_ENCODER_FUNCTIONS.get(torch_class(str(activation)))
    if function is None or (function == "softmax" and count == 1):
        known = [name for name in _CROSS_ENCODER_FUNCTIONS if count > 1 or name != "Softmax"]
        raise CheckpointError(
            f"The checkpoint's activation_fn is {activation!r}; supported are torch's {', '.join(known)}. Set "
            '"function_to_apply" in config.json to sigmoid, softmax or none to choose one.'
        )
    return function


def _as_scorer(
    heads: tuple[HeadSpec, ...], config: Any, files: SentenceTransformersFiles, relevant: str | None
) -> tuple[HeadSpec, ...]:
    """A classifier with two labels as a scorer: the score of the relevant label less that of the other. Its sigmoid
    equals the softmax share.

    Unless ``relevant`` names it, the relevant label is the second of a checkpoint whose labels have no names, as in
    monoBERT (arXiv:1901.04085) and its successors. Other heads stay. Raises ConfigError.
    """
    head = heads[0]
    last = head.layers[-1] if head.output == "logits" and head.layers else None
    if not isinstance(last, DenseSpec) or last.out_features != 2:
        if relevant is not None:
            raise ConfigError("relevant_label is for classifiers of two labels: leave it out for this model.")
        return heads
    if (function := _function(config, files, 2)) != "softmax":
        raise ConfigError(
            f"The checkpoint's two labels are scored by {function}, each by itself, and not against each other: it "
            "is not a reranker. Build it with --task classify."
        )
    names = _label_names(config, 2)
    if relevant is None and names != ("LABEL_0", "LABEL_1"):
        raise ConfigError(
            f"The checkpoint's labels are {' and '.join(names)}: say which one means relevant, with --relevant-label."
        )
    if relevant is not None and relevant not in names:
        raise ConfigError(f"relevant_label {relevant!r} is none of the checkpoint's labels, {' and '.join(names)}.")
    factors = _PREFERENCES[names.index(relevant) if relevant is not None else 1]
    compared = DenseSpec(f"{last.name}.compared", 2, 1, bias=False, factors=factors)
    return (replace(head, layers=(*head.layers, compared)),)


def _preferred(head: HeadSpec) -> int | None:
    """The index of the label that ``_as_scorer`` has preferred; None for other heads."""
    last = head.layers[-1] if head.layers else None
    if not isinstance(last, DenseSpec) or last.factors not in _PREFERENCES or last.name.startswith("lm_head."):
        return None
    return _PREFERENCES.index(last.factors)


def side_modules(spec: ModelSpec, files: SentenceTransformersFiles) -> dict[str, SideModule]:
    """Locations of the head weights outside the transformer's files, by layer name."""
    stored: Mapping[str, str] = {
        layer.name: "norm" if isinstance(layer, NormLayerSpec) else "linear"
        for head in spec.heads
        for layer in (*head.token_layers, *head.layers)
        if isinstance(layer, DenseSpec | NormLayerSpec)
    }
    modules = {name: SideModule(folder, stored[name]) for name, folder in files.tail_folders.items() if name in stored}
    for name in _TOKEN_FILES:
        if name in stored:
            modules[name] = SideModule(files.transformer_folder / f"{name}.pt")
    return modules


def _all_heads(
    family: Family,
    config: Any,
    own: tuple[HeadSpec, ...],
    files: SentenceTransformersFiles,
    choice: HeadChoice,
    tokenizer: Tokenizer,
) -> tuple[HeadSpec, ...]:
    """Heads by the user's choice first, then by the files, then ``own``, the heads of the class."""
    if choice.task == "decide":
        _require_token_scores(family, config)
        return (_of_options(family, config, choice.score_tokens, tokenizer),)
    if choice.score_tokens:
        _require_token_scores(family, config)
        return (_token_score(family, config, _ids_of(choice.score_tokens, tokenizer)),)
    if files.gives_scores and not choice.pooling and choice.task != "embed":
        return (HeadSpec("logits", files.pooling or ("mean",), layers=files.tail),)
    if choice.pooling or choice.task == "embed" or (files.pooling and choice.task == "auto"):
        return (_embedding(own, files, choice.pooling), *_token_heads(config, files, choice.task))
    if files.score_ids:
        _require_token_scores(family, config)
        return (_token_score(family, config, files.score_ids),)
    if files.per_token:
        return (HeadSpec("token_embedding", token_layers=files.tail),)
    if files.sparse:
        return (_sparse(own, files.sparse),)
    if files.is_classifier and own[0].output != "logits":
        raise CheckpointError(
            "sentence_bert_config.json has the transformer_task sequence-classification, but the class in config.json "
            "has no labels: correct its architectures to the ForSequenceClassification class, or download the "
            "checkpoint again."
        )
    return (*own, *(_token_heads(config, files, choice.task) if own[0].output == "embedding" else ()))


def _embedding(own: tuple[HeadSpec, ...], files: SentenceTransformersFiles, pooling: Pooling | None) -> HeadSpec:
    embeds = own[0].output == "embedding"
    default = own[0].pooling if embeds else ("mean",)
    chosen = (pooling,) if pooling else files.pooling or default
    layers = own[0].layers if embeds and files.pooling is None else files.tail
    if files.per_token or files.gives_scores:
        layers = ()
    return HeadSpec("embedding", chosen, own[0].token_layers if embeds else (), layers)


def _token_states(heads: tuple[HeadSpec, ...]) -> HeadSpec:
    if [(head.output, head.token_layers) for head in heads] != [("embedding", ())]:
        raise ConfigError("token_embeddings adds the tokens' states to a dense embedding: leave it out for this model.")
    return HeadSpec("token_embedding")


def _sparse(own: tuple[HeadSpec, ...], pooling: SparsePooling) -> HeadSpec:
    head = own[0]
    if head.output != "sparse":
        raise CheckpointError(
            "modules.json asks for SpladePooling, but the class in config.json has no scores of the vocabulary: "
            "correct its architectures to the ForMaskedLM class, or download the checkpoint again."
        )
    logarithms = (ActivationSpec("log1p_relu"),) * pooling.logarithms
    if pooling.mode == "max":  # the logarithm is monotonic: the largest argument gives the largest value
        return HeadSpec(head.output, ("max",), head.token_layers, logarithms)
    return HeadSpec(head.output, ("sum",), (*head.token_layers, *logarithms))


def _token_heads(config: Any, files: SentenceTransformersFiles, task: str) -> tuple[HeadSpec, ...]:
    """The heads of the files beside the weights; for a named ``task`` only its own, as reading the files may need
    torch."""
    heads = []
    for name, output in _TOKEN_FILES.items():
        path = files.transformer_folder / f"{name}.pt"
        if path.is_file() and task in ("auto", *_TASKS_OF[output]):
            width = 1 if output == "token_weights" else stored_width(path)
            layer = DenseSpec(name, config.hidden_size, width, activation="relu" if width == 1 else "identity")
            heads.append(HeadSpec(output, token_layers=(layer,)))
    return tuple(heads)


def _require_token_scores(family: Family, config: Any) -> None:
    if "lm_head.weight" not in family.weights:
        raise ConfigError(
            f"score_tokens and the task decide need a language model; {config.model_type} has no scores of tokens. "
            "Leave score_tokens out, or build for another task."
        )


def _of_options(family: Family, config: Any, tokens: tuple[str, ...], tokenizer: Tokenizer) -> HeadSpec:
    """What options are told apart by: the scores of ``tokens``, a column each; without any, likelihoods of texts."""
    if not tokens:
        factor = family.score_factor(config)
        layer = LikelihoodSpec("lm_head", config.hidden_size, config.vocab_size, factor, _score_cap(config))
        return HeadSpec("token_likelihood", token_layers=(layer,))
    ids = _ids_of(tokens, tokenizer)
    if len({*ids}) < len(ids):
        raise ConfigError("score_tokens names a token twice: options that share one could not be told apart.")
    return _token_scores(family, config, ids)


def _token_score(family: Family, config: Any, ids: tuple[int, ...]) -> HeadSpec:
    """The score of the last of one or two tokens, at the last position; for two, less that of the first, so that its
    sigmoid is the share of "yes". It is one row of a matrix, unless a soft cap bends each score before the subtraction.
    Of more tokens each has its score.
    """
    if len(ids) > 2:
        return _token_scores(family, config, ids)
    signs = (1.0, -1.0)[: len(ids)]
    cap, factor = _score_cap(config), family.score_factor(config)
    if cap is None:
        row = tuple((index, sign * factor) for index, sign in zip(ids[::-1], signs, strict=True))
        layer = DenseSpec("lm_head", config.hidden_size, 1, bias=False, rows=(row,))
        return HeadSpec("logits", ("last",), layers=(layer,))
    rows = tuple(((index, factor / cap),) for index in ids[::-1])
    factors = tuple(sign * cap for sign in signs)
    capped = DenseSpec("lm_head", config.hidden_size, len(ids), bias=False, activation="tanh", rows=rows)
    compared = DenseSpec("lm_head.compared", len(ids), 1, bias=False, factors=factors)
    return HeadSpec("logits", ("last",), layers=(capped, compared))


def _token_scores(family: Family, config: Any, ids: tuple[int, ...]) -> HeadSpec:
    if _score_cap(config) is not None:
        raise ConfigError(
            f"{config.model_type} bends its scores (final_logit_softcapping), and bei compares two of such at most: "
            "name two score_tokens, or build with --task decide and none."
        )
    factor = family.score_factor(config)
    rows = tuple(((index, factor),) for index in ids)
    layer = DenseSpec("lm_head", config.hidden_size, len(ids), bias=False, rows=rows)
    return HeadSpec("logits", ("last",), layers=(layer,))


def _score_cap(config: Any) -> float | None:
    """The cap c of a language model whose scores s are c * tanh(s / c) (Gemma 2, arXiv:2408.00118); Gemma 3 has none
    unless its config gives one."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is None:
        return None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
        raise CheckpointError(
            f"config.json has final_logit_softcapping = {cap!r}, which is no number above 0: set it to null for scores "
            "without a soft cap, or download the checkpoint again."
        )
    return float(cap)


def _ids_of(tokens: tuple[str, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = [tokenizer.token_to_id(token) for token in tokens]  # None for a text that is not a token
    unknown = [token for token, index in zip(tokens, ids, strict=True) if index is None]
    if unknown:
        raise ConfigError(
            f"score_tokens: {unknown[0]!r} is not one token of the vocabulary. Name tokens as the vocabulary spells "
            "them, such as no,yes (a space in front may be part of one)."
        )
    return tuple(index for index in ids if index is not None)


def _check_widths(heads: tuple[HeadSpec, ...], hidden_size: int) -> None:
    for head in heads:
        width = hidden_size
        for index, layer in enumerate((*head.token_layers, None, *head.layers)):
            if layer is None:
                width *= max(1, len(head.pooling))
            expected = layer.in_features if isinstance(layer, DenseSpec) else None
            if expected not in (None, width):
                raise CheckpointError(
                    f"A Dense layer (number {index}) takes {expected} features but is given {width}: check the "
                    "pooling, or download the checkpoint again."
                )
            width = layer.out_features if isinstance(layer, DenseSpec) else width
