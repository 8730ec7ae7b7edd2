"""What a family file says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bei.errors import CheckpointError
from bei_build.spec import Activation, ModelSpec

# transformers' ACT2FN names -> ours. "gelu" there is the exact form, "gelu_new" and "gelu_pytorch_tanh" the tanh one.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class Family:
    """One HF config class.

    ``weights`` maps our module names to the checkpoint's; ``{i}`` is the layer index; ``.weight`` and ``.bias`` are
    appended on both sides. ``prefix`` is what task classes put before the names of their base model. ``unused`` are
    the beginnings of tensor names (without prefix) that an embedding model leaves aside.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    prefix: str
    weights: Mapping[str, str]
    unused: tuple[str, ...]
    spec_from_config: Callable[[Any, str], ModelSpec]


def activation_named(name: object) -> Activation:
    """Our name for transformers' activation ``name``; CheckpointError if there is none."""
    if isinstance(name, str) and name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise CheckpointError(f"Activation {name!r} is not supported. Supported: {', '.join(sorted(_ACTIVATIONS))}.")


def require(config: Any, key: str, expected: object) -> None:
    """Refuse a config whose ``key`` (if present) asks for something the family does not describe."""
    value = getattr(config, key, expected)
    if value != expected:
        raise CheckpointError(
            f"config.json has {key} = {value!r}; bei's {config.model_type} family supports only {expected!r}."
        )
