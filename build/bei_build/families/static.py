"""Static embeddings: one table, and a text's vector is the mean of its tokens' rows. No layers, no special tokens.

model2vec's StaticModel leaves unknown tokens out of the mean and reads 512 tokens unless its config has another limit,
of no more characters than as many of its usual tokens have (``usual_chars``); its tokens may share rows
(``shared_rows``). Its config's other keys describe the making of the table; they are not
read. sentence-transformers' StaticEmbedding counts every token and reads all of them. transformers has a class for
neither. SSE (code that RikkaBotan's repositories carry) is a StaticEmbedding with a scaled tanh behind its mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, embedder
from bei_build.spec.head_layers import ScaledTanhSpec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import EmbeddingsSpec

_MODEL2VEC_LENGTH = 512  # model2vec's default limit for the tokens of a text


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return ModelSpec(
        family="static",
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size),
        layers=(),
    )


def _from_model2vec(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    length = raw.get("max_length", _MODEL2VEC_LENGTH)
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(f"config.json has max_length = {length!r}: correct it to a number of tokens, or null.")
    normalize = raw.get("normalize") or False  # model2vec allows null
    if type(normalize) is not bool:
        raise CheckpointError(f"config.json has normalize = {normalize!r}: correct it to true or false.")
    return {**raw, "usual_length": length, "unit_length": normalize, "cuts_chars": length is not None}


def usual_chars(tokens: Iterable[str]) -> int:
    """Characters of a usual token of a vocabulary: their median, as model2vec has it (``median_token_length``)."""
    return int(median([len(token) for token in tokens]))


def _stable(config: Any) -> tuple[HeadSpec, ...]:
    """SSE: the mean, then a scaled tanh; no unit length."""
    return (HeadSpec("embedding", ("mean",), layers=(ScaledTanhSpec("dyt", config.hidden_size),)),)


MODEL2VEC_FAMILY = Family(
    model_type="model2vec",
    architectures={"StaticModel": embedder},
    prefix="",
    weights={"embeddings.word.weight": ("embeddings", "embedding.weight")},
    unused=(),
    spec_from_config=_spec_from_config,
    translate=_from_model2vec,
    reference_class=None,
    position_limit=False,
    special_tokens=False,
    pools_unknown=False,
    stored_sizes=True,
    shares_rows=True,
)
SENTENCE_TRANSFORMERS_FAMILY = replace(
    MODEL2VEC_FAMILY,
    model_type="static_embedding",  # our own name: it has no config.json
    architectures={"StaticEmbedding": embedder},
    translate=None,
    pools_unknown=True,
    shares_rows=False,
)
SSE_FAMILY = replace(
    SENTENCE_TRANSFORMERS_FAMILY,
    model_type="stable_static_embedding",  # our own name too
    architectures={"SSE": _stable},
    weights={**MODEL2VEC_FAMILY.weights, **{f"dyt.{part}": f"dyt.{part}" for part in ("alpha", "beta", "bias")}},
)
