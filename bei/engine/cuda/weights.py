"""The weights of a package: a safetensors file beside it, mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bei.artifact.held_files import shown_path
from bei.engine.pytorch import EXTRA
from bei.errors import EngineError
from bei.utils.libraries import importing

# A torch.Tensor.
Tensor: TypeAlias = Any


def read_weights(path: Path, names: Sequence[str], to_device: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors ``names`` of the file ``path``, each as ``to_device`` makes it of the mapped one.

    Other processes that map the file share its memory. Raises EngineError, MissingDependencyError.
    """
    with importing("safetensors", EXTRA, "Loading weights"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as file:
            missing = sorted(set(names).difference(file.keys()))
            if missing:
                raise EngineError(
                    f"The package reads {len(missing)} weights that are not in {shown_path(path)} ({missing[0]}): "
                    "build the artifact again."
                )
            return {name: to_device(file.get_tensor(name)) for name in names}
    except (SafetensorError, OSError) as error:
        raise EngineError(
            f"The weights in {shown_path(path)} cannot be read ({error}). Copy the artifact anew from its source, or "
            "build it again."
        ) from error
