"""A GGUF file and the settings beside it, laid out as a Hugging Face checkpoint in a temporary folder.

The folder has a link to the file, links to the settings that lie beside it, and the settings that do not, written from
the file's metadata. Weights are read from the file itself; only Dense modules behind the pooling are written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bei.errors import CheckpointError
from bei_build.checkpoint.gguf_settings import config_of, llama3_scaling, pooling_of
from bei_build.checkpoint.locate import READ_SUFFIXES, Location, check_entries
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder
from bei_build.tokenizer.gguf_tokenizer import tokenizer_of
from bei_build.weights.gguf_names import DENSE, ROPE_FACTORS, check_architecture
from bei_build.weights.gguf_store import GgufStore
from bei_build.weights.tensor_store import GGUF

_MODULE = "sentence_transformers.models."
# Files from which transformers makes a tokenizer.
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")


def laid_out(location: Location) -> Location:
    """``location`` with its GGUF file, if it has one, laid out as a checkpoint's folder, which is removed with the
    result. Raises CheckpointError, WeightsError, MissingDependencyError."""
    if location.gguf is None:
        return location
    store = GgufStore(location.gguf)
    check_architecture(store.header)
    scratch = ScratchFolder("bei-gguf-")
    folder = scratch.path
    check_entries(location.folder)
    _link_settings(location.folder, folder)
    (folder / GGUF).symlink_to(location.gguf.resolve())
    _add_config(folder, store)
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        text, settings = tokenizer_of(store.header)
        (folder / "tokenizer.json").write_text(text)
        _write(folder / "tokenizer_config.json", settings)
    _add_modules(folder, store)
    return replace(location, folder=folder, scratch=scratch)


def _link_settings(source: Path, folder: Path) -> None:
    """Link the settings in ``source``, and the files of its modules."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in READ_SUFFIXES:
            (folder / path.name).symlink_to(path.resolve())
    if (source / "modules.json").is_file():
        for module in (path for path in source.iterdir() if path.is_dir()):
            (folder / module.name).mkdir()
            for path in (path for path in module.iterdir() if path.is_file()):
                (folder / module.name / path.name).symlink_to(path.resolve())


def _add_config(folder: Path, store: GgufStore) -> None:
    """Write config.json unless there is one that describes a model: some repositories have one with a model_type
    only."""
    path = folder / "config.json"
    if path.is_file() and read_object(path).keys() > {"model_type"}:
        return
    config = config_of(store.header)
    if ROPE_FACTORS in store.shapes:
        factors = store.read(ROPE_FACTORS).reshape(-1)
        rotates = "rope_theta" in config and "head_dim" in config
        scaling = llama3_scaling(factors, config["rope_theta"], config["head_dim"]) if rotates else None
        if scaling is None:
            raise CheckpointError(
                f"The GGUF file's {ROPE_FACTORS} are none of Llama 3's. Put the model's own config.json beside it."
            )
        config["rope_scaling"] = scaling
    path.unlink(missing_ok=True)
    _write(path, config)


def _add_modules(folder: Path, store: GgufStore) -> None:
    """Write modules.json and its modules where the file names a pooling and no modules.json is there."""
    dense = [name for name in DENSE if name in store.shapes]
    if (folder / "modules.json").is_file():
        if dense:
            raise CheckpointError(
                f"{dense[0]} in the GGUF file is a Dense module, and modules.json beside it names its own: take "
                "modules.json away."
            )
        return
    if (pooling := pooling_of(store.header)) is None:
        if dense:
            raise CheckpointError(f"The GGUF file has {dense[0]} and names no pooling before it.")
        return
    modules = [*_modules(folder, store, dense, pooling)]
    _write(folder / "modules.json", [{"idx": at, **module} for at, module in enumerate(modules)])


def _modules(folder: Path, store: GgufStore, dense: list[str], pooling: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Entries of modules.json, whose folders are written. Vectors are normalized, as llama.cpp's are."""
    from safetensors.numpy import save_file

    yield {"name": "0", "path": "", "type": f"{_MODULE}Transformer"}
    _write(_made(folder / "1_Pooling") / "config.json", pooling)
    yield {"name": "1", "path": "1_Pooling", "type": f"{_MODULE}Pooling"}
    for at, name in enumerate(dense, 2):
        module = _made(folder / f"{at}_Dense")
        if len(shape := store.shapes[name]) != 2:
            raise CheckpointError(
                f"{name} in the GGUF file has shape {list(shape)}, and is no matrix: download it again."
            )
        rows, columns = shape
        settings = {"in_features": columns, "out_features": rows, "bias": False}
        _write(module / "config.json", {**settings, "activation_function": "torch.nn.modules.linear.Identity"})
        save_file({"linear.weight": store.read(name)}, module / "model.safetensors")
        yield {"name": str(at), "path": module.name, "type": f"{_MODULE}Dense"}
    end = len(dense) + 2
    _made(folder / f"{end}_Normalize")
    yield {"name": str(end), "path": f"{end}_Normalize", "type": f"{_MODULE}Normalize"}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))
