"""Finding a checkpoint, reading it, and giving its weights under our names.

A checkpoint is a folder: a local path, an installed Python package that carries a model, or a hub repository.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact import Role, Source, sha256_of_file
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, MissingDependencyError
from bei_build.families import family_of
from bei_build.families.base import Family
from bei_build.heads import HeadChoice, Labels, choose_heads, labels_of, side_modules
from bei_build.late_interaction import Side, Sides, roles_of
from bei_build.model_weights import ModelWeights, SideModule, stored_shape, with_stored_widths
from bei_build.sentence_transformers import SentenceTransformersFiles, read_sentence_transformers
from bei_build.settings import read_object
from bei_build.spec import ModelSpec
from bei_build.tokenizer import (
    check_vocabulary,
    model_max_length,
    stored_truncation,
    tokenizer_from_checkpoint,
    unknown_id,
)
from bei_build.weights import weight_files

_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json", "*_linear.pt"]
_HUB_PATTERNS += ["artifact.metadata"]
_READ_SUFFIXES = (".json", ".txt", ".model", ".metadata")  # configs and tokenizers; weights are found by weight_files
# Files in which quantizers leave their settings where config.json does not have them.
_QUANTIZATION_CONFIGS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_HUB_FALLBACK = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "*/pytorch_model.bin"]
# What stands for the config.json that sentence-transformers does not write beside a StaticEmbedding.
_STATIC_EMBEDDING = {"model_type": "static_embedding", "architectures": ["StaticEmbedding"]}


@dataclass(frozen=True)
class Location:
    """Where a checkpoint was found. ``kind`` is path, package or hub."""

    folder: Path
    model: str
    kind: str
    revision: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, read but for its weights."""

    location: Location
    files: SentenceTransformersFiles
    family: Family
    spec: ModelSpec
    tokenizer: Tokenizer
    max_seq_len: int
    labels: Labels | None
    modules: Mapping[str, SideModule]
    config: Any
    roles: Mapping[Side, Role]

    @property
    def folder(self) -> Path:
        """Where config, tokenizer and weights of the transformer lie."""
        return self.files.transformer_folder

    def weights(self) -> ModelWeights:
        """Open the weights. Raises WeightsError naming the tensors that are missing, misshapen or left over."""
        tied = bool(getattr(self.config, "tie_word_embeddings", True))
        return ModelWeights(self.spec, self.family, self.folder, self.modules, tied=tied)


def locate(model: str, revision: str | None = None) -> Location:
    """Find ``model``: an existing folder, else an installed package, else a hub repository.

    Raises CheckpointNotFoundError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Location(path.resolve(), path.resolve().name, "path")
    if path.exists() or model.startswith((".", "/", "~")):
        raise CheckpointNotFoundError(
            f"{model} is not a folder. Pass a checkpoint's folder, the name of an installed package, or a hub id."
        )
    if (folder := _package_folder(model)) is not None:
        return Location(folder, model, "package")
    return _from_hub(model, revision)


def read_checkpoint(
    location: Location,
    choice: HeadChoice | None = None,
    max_seq_len: int | None = None,
    document_length: int | None = None,
) -> Checkpoint:
    """Read config, sentence-transformers files and tokenizer. Arguments override what the files say.

    Raises CheckpointError and its subclasses.
    """
    files = read_sentence_transformers(location.folder)
    folder = files.transformer_folder
    config, architecture, family = _config(folder, is_static=files.is_static)
    spec = _spec(family, config, architecture)
    tokenizer = tokenizer_from_checkpoint(
        folder, files.do_lower_case, files.markers, special_tokens=not family.is_static
    )
    heads = choose_heads(family, config, architecture, files, choice or HeadChoice(), tokenizer)
    spec = replace(spec, heads=with_stored_widths(heads, family, folder))
    if not family.pools_unknown:
        spec = _without_unknown(spec, tokenizer)
    check_vocabulary(tokenizer, spec.embeddings.vocab_size)
    files = replace(files, sides=_sides(files, spec, document_length))
    usual = config.usual_length if family.is_static else model_max_length(folder)
    longest = _longest(spec, config, files, usual, max_seq_len)
    if longest <= (special := tokenizer.num_special_tokens_to_add(is_pair=False)):
        raise CheckpointError(f"max_seq_len {longest} leaves no room beside the {special} special tokens of a text.")
    if document_length is not None and document_length > longest:
        raise CheckpointError(f"document_length {document_length} is above max_seq_len {longest}: choose at most that.")
    roles = roles_of(files.sides, files.prompts, tokenizer, folder, longest)
    # A side that has no prompt may be named too.
    files = replace(files, prompts={**dict.fromkeys(roles, ""), **files.prompts})
    spec = replace(spec, partial_keys=any(role.expansion and not role.expansion.attended for role in roles.values()))
    modules, labels = side_modules(spec, files), labels_of(spec, config, files.activation)
    return Checkpoint(location, files, family, spec, tokenizer, longest, labels, modules, config, roles)


def source_of(checkpoint: Checkpoint) -> Source:
    """The manifest's record of the checkpoint; hashes every file that was read."""
    folders = {checkpoint.location.folder, *checkpoint.files.folders}
    found = (path for folder in folders for suffix in _READ_SUFFIXES for path in folder.glob(f"*{suffix}"))
    files = {path for path in found if path.is_file()}
    files.update(weight_files(checkpoint.folder))
    for module in checkpoint.modules.values():
        files.update(weight_files(module.location) if module.location.is_dir() else [module.location])
    sha = hashlib.sha256()
    for path in sorted(files):
        sha.update(f"{path.relative_to(checkpoint.location.folder).as_posix()} {sha256_of_file(path)}\n".encode())
    location = checkpoint.location
    return Source(model=location.model, kind=location.kind, revision=location.revision, sha256=sha.hexdigest())


def _config(folder: Path, *, is_static: bool) -> tuple[Any, str, Family]:
    """The HF config (its class knows the defaults that config.json leaves out), the architecture's name, its family."""
    raw = _raw_config(folder, is_static=is_static)
    path = folder / "config.json"
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str):
        raise CheckpointError(f'{path} does not name its architectures. Add the class, e.g. ["BertModel"].')
    # Before transformers, which would only say that it does not know it.
    family = family_of(raw["model_type"], architecture, raw)
    if is_static and not family.is_static:
        raise CheckpointError(
            f"modules.json asks for StaticEmbedding, but {path} describes a {architecture}: the two are not of one "
            "checkpoint. Download it again."
        )
    if family.is_static:
        vocab_size, hidden_size = stored_shape("embeddings.word.weight", family, folder)
        raw = {**raw, "vocab_size": vocab_size, "hidden_size": hidden_size}
    # Without torch, which configs do not need, transformers would print that models are not available.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
    except ImportError as error:
        raise MissingDependencyError("transformers", "cpu", "Reading a checkpoint") from error
    try:
        translated = family.translate(raw) if family.translate else raw
        if translated is raw and raw["model_type"] == family.model_type:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        else:
            config_class = PreTrainedConfig if family.is_static else CONFIG_MAPPING[family.model_type]
            config = config_class.from_dict({**translated, "model_type": family.model_type})
    except CheckpointError:  # of translate
        raise
    except Exception as error:  # transformers validates with several exception types
        raise CheckpointError(
            f"{path} was refused by transformers ({error}). Download the checkpoint again."
        ) from error
    return config, architecture, family


def _raw_config(folder: Path, *, is_static: bool) -> dict[str, Any]:
    """config.json, or what stands for it beside a StaticEmbedding."""
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds an adapter. Merge it into its base model (peft: merge_and_unload, then save_pretrained) "
            "and build the result."
        )
    if is_static and not path.is_file():
        return {**_STATIC_EMBEDDING, "usual_length": stored_truncation(folder)}
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{folder} has no config.json: it is not a Hugging Face checkpoint. Pass the folder that holds one."
        )
    raw = read_object(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} does not name a model_type. Download the checkpoint again.")
    _refuse_quantized(folder, raw)
    return raw


def _refuse_quantized(folder: Path, raw: dict[str, Any]) -> None:
    """Raise CheckpointError for a checkpoint whose configs say that it is quantized."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    for name, writer in _QUANTIZATION_CONFIGS.items():
        if not method and (path := folder / name).is_file():
            method, settings = writer, read_object(path)
    if method == "modelopt":
        raise CheckpointError(
            f"The checkpoint is quantized by ModelOpt ({_modelopt_format(settings)}): FP8 checkpoints are not "
            "supported yet. Build from the original 16- or 32-bit one, with --precision bf16, fp16 or int8 for a "
            "smaller engine."
        )
    if method:
        raise CheckpointError(
            f"The checkpoint is quantized ({method}): build from the original 16- or 32-bit one; bei quantizes itself "
            "(--precision int8)."
        )


def _modelopt_format(settings: Any) -> str:
    """The format's name: config.json has it at the top, hf_quant_config.json under ``quantization``."""
    if not isinstance(settings, dict):
        return "FP8"
    nested = settings.get("quantization")
    return str((nested if isinstance(nested, dict) else settings).get("quant_algo") or "FP8")


def _spec(family: Family, config: Any, architecture: str) -> ModelSpec:
    """The family's reading of ``config``. transformers checks the types of its values, not that they make a model."""
    try:
        spec = family.spec_from_config(config, architecture)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json describes no model ({error}). Download the checkpoint again.") from error
    if not spec.layers and not family.is_static:
        raise CheckpointError("config.json describes a model without layers. Download the checkpoint again.")
    return spec


def _without_unknown(spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """``spec`` with the tokenizer's unknown token left out of its means. Raises ConfigError for other poolings."""
    if any(head.pooling != ("mean",) for head in spec.heads):
        raise ConfigError(
            f"{spec.architecture} gives means of rows without unknown tokens, and nothing else: leave pooling and "
            "token_embeddings out."
        )
    return replace(spec, unpooled_id=unknown_id(tokenizer))


def _sides(files: SentenceTransformersFiles, spec: ModelSpec, document_length: int | None) -> Sides:
    """How late interaction reads its two sides; nothing for other models, whatever their files say."""
    sides = dict(files.sides) if [head.output for head in spec.heads] == ["token_embedding"] else {}
    if document_length is not None:
        if "document" not in sides:
            raise ConfigError(
                "document_length is for late interaction whose files say how documents are read: leave it out for this "
                "model."
            )
        sides["document"] = replace(sides["document"], length=document_length)
    return sides


def _longest(
    spec: ModelSpec, config: Any, files: SentenceTransformersFiles, usual: int | None, asked: int | None
) -> int:
    """Relative and rotary positions reach as far as the config says; a table of positions has no more rows.

    ``usual`` is what the tokenizer's files, or a static model's config, give a text if nothing else is said.
    """
    table = spec.embeddings.max_positions or config.max_position_embeddings
    if asked is not None and asked > table:
        raise CheckpointError(
            f"max_seq_len {asked} is beyond the {table} positions of the checkpoint: choose at most that."
        )
    if files.max_seq_length is not None and files.max_seq_length < 1:
        raise CheckpointError(f"max_seq_length {files.max_seq_length} of the checkpoint's files must be at least 1.")
    # PyLate's max_seq_length is what its last call has left there: its code sets it by the lengths of the two sides.
    lengths = [side.length for side in files.sides.values() if side.length is not None]
    return asked or min(table, max(files.max_seq_length or usual or table, *lengths, 0))


def _package_folder(model: str) -> Path | None:
    """The folder with a ``config.json`` inside the installed package ``model``, found without importing it."""
    name = model.replace("-", "_")
    if not name.isidentifier():
        return None
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    roots = [Path(location) for location in found.submodule_search_locations]
    for root in roots:
        marks = sorted(root.rglob("modules.json")) or sorted(root.rglob("config.json"))
        if marks:
            return marks[0].parent
    raise CheckpointNotFoundError(
        f"The installed package {model!r} carries no checkpoint (no config.json in it). "
        "Pass a checkpoint's folder or a hub id (owner/name)."
    )


def _folders_with_weights(folder: Path) -> list[Path]:
    """The root and those modules of a downloaded repository that have weights."""
    return [folder, *(path.parent for kind in ("Dense", "LayerNorm") for path in folder.glob(f"*_{kind}/config.json"))]


def _from_hub(model: str, revision: str | None) -> Location:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
        if any(not list(part.glob("*.safetensors")) for part in _folders_with_weights(folder)):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*_HUB_PATTERNS, *_HUB_FALLBACK]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{model!r} is neither a folder here nor an installed package, and the hub did not give it "
            f"({type(error).__name__}). Check the name, or the network, or pass the path of a downloaded checkpoint."
        ) from error
    return Location(folder, model, "hub", folder.name)  # a snapshot's folder is called after its commit
