"""Which heads a checkpoint gets: what its class, its sentence-transformers files and the user say, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from tokenizers import Tokenizer

from bei.errors import CheckpointError, ConfigError
from bei_build.families.base import Family
from bei_build.model_weights import SideModule
from bei_build.sentence_transformers import SentenceTransformersFiles
from bei_build.spec import (
    ActivationSpec,
    DenseSpec,
    HeadSpec,
    ModelSpec,
    NormLayerSpec,
    Pooling,
)

TASKS = ("auto", "embed", "embed_sparse", "embed_tokens", "classify", "rerank", "classify_tokens")

# Files beside the weights that hold one linear layer on every token: layer name -> (file, output, activation). BGE-M3
# (arXiv:2402.03216) has both; the dense embedding, lexical weights and token vectors then come out of one pass.
_TOKEN_FILES = {"sparse_linear": "token_weights", "colbert_linear": "token_embedding"}


@dataclass(frozen=True)
class HeadChoice:
    """What the user asks for. ``score_tokens``: a language model's tokens whose scores are compared, (no, yes)."""

    task: str = "auto"
    pooling: Pooling | None = None
    score_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Labels:
    """What the columns of ``logits`` or ``token_logits`` mean, and what makes scores of them."""

    names: tuple[str, ...]
    function: Literal["sigmoid", "softmax", "none"]


def choose_heads(
    family: Family,
    config: Any,
    architecture: str,
    files: SentenceTransformersFiles,
    choice: HeadChoice,
    tokenizer: Tokenizer,
) -> tuple[HeadSpec, ...]:
    """The heads to build. Raises CheckpointError, ConfigError where the checkpoint has no such head."""
    own = family.architectures[architecture](config)
    if choice.score_tokens:
        heads: tuple[HeadSpec, ...] = (_token_comparison(family, config, choice.score_tokens, tokenizer),)
    elif choice.pooling or choice.task == "embed" or (files.pooling and choice.task == "auto"):
        heads = (_embedding(own, files, choice.pooling), *_token_heads(config, files))
    elif files.per_token:
        heads = (HeadSpec("token_embedding", token_layers=files.tail),)
    elif files.sparse == "sum":
        heads = tuple(
            HeadSpec(head.output, ("sum",), (*head.token_layers, ActivationSpec("log1p_relu"))) for head in own
        )
    else:
        heads = (*own, *(_token_heads(config, files) if own[0].output == "embedding" else ()))
    if choice.task not in ("auto", *(task for head in heads for task in tasks_of(head, config.hidden_size))):
        raise ConfigError(
            f"{architecture} has no head for the task {choice.task}; it has "
            f"{', '.join(task for head in heads for task in tasks_of(head, config.hidden_size))}."
        )
    _check_widths(heads, config.hidden_size)
    return heads


def tasks_of(head: HeadSpec, hidden_size: int) -> tuple[str, ...]:
    """What a served ``head`` can do. A classifier of one label is a scorer: it reranks."""
    if head.output == "logits":
        return ("rerank", "classify") if head.dimension(hidden_size) == 1 else ("classify",)
    return {
        "embedding": ("embed",),
        "sparse": ("embed_sparse",),
        "token_weights": ("embed_sparse",),
        "token_embedding": ("embed_tokens",),
        "token_logits": ("classify_tokens",),
    }[head.output]


def labels_of(spec: ModelSpec, config: Any) -> Labels | None:
    """The labels of a classifier, and its function: ``function_to_apply`` of the config, else by ``problem_type``."""
    head = spec.head("logits") or spec.head("token_logits")
    if head is None:
        return None
    count = head.dimension(spec.hidden_size)
    named = {int(key): str(value) for key, value in (getattr(config, "id2label", None) or {}).items()}
    names = tuple(named.get(index, f"LABEL_{index}") for index in range(count))
    if head.output == "token_logits":
        return Labels(names, "softmax")
    by_problem = {
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
        "regression": "none",
    }
    function = getattr(config, "function_to_apply", None) or by_problem.get(getattr(config, "problem_type", None) or "")
    if function not in (None, "sigmoid", "softmax", "none"):
        raise CheckpointError(f"config.json has function_to_apply {function!r}; supported: sigmoid, softmax, none.")
    chosen = function or ("sigmoid" if count == 1 else "softmax")
    return Labels(names, cast(Literal["sigmoid", "softmax", "none"], chosen))


def side_modules(spec: ModelSpec, files: SentenceTransformersFiles) -> dict[str, SideModule]:
    """Where the weights of head layers lie that are not in the transformer's files, by layer name."""
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


def _embedding(own: tuple[HeadSpec, ...], files: SentenceTransformersFiles, pooling: Pooling | None) -> HeadSpec:
    default = own[0].pooling if own[0].output == "embedding" else ("mean",)
    chosen = (pooling,) if pooling else files.pooling or default
    return HeadSpec("embedding", chosen, layers=files.tail)


def _token_heads(config: Any, files: SentenceTransformersFiles) -> tuple[HeadSpec, ...]:
    heads = []
    for name, output in _TOKEN_FILES.items():
        if (files.transformer_folder / f"{name}.pt").is_file():
            width = 1 if output == "token_weights" else config.hidden_size
            layer = DenseSpec(name, config.hidden_size, width, activation="relu" if width == 1 else "identity")
            heads.append(HeadSpec(output, token_layers=(layer,)))  # type: ignore[arg-type]
    return tuple(heads)


def _token_comparison(family: Family, config: Any, tokens: tuple[str, ...], tokenizer: Tokenizer) -> HeadSpec:
    """The score of the second token less that of the first, at the last position: its sigmoid is the share of "yes"."""
    if "lm_head.weight" not in family.weights:
        raise ConfigError(f"score_tokens needs a language model; {config.model_type} has no scores of tokens.")
    ids = [tokenizer.token_to_id(token) for token in tokens]  # None for a text that is no token
    if len(ids) != 2 or None in ids:
        raise ConfigError(f"score_tokens must be two tokens of the vocabulary, such as no,yes; not {','.join(tokens)}.")
    no, yes = (token for token in ids if token is not None)
    layer = DenseSpec("lm_head", config.hidden_size, 1, bias=False, rows=(yes, no))
    return HeadSpec("logits", ("last",), layers=(layer,))


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
