"""Reading of a checkpoint: config, sentence-transformers' files, heads, sides. No code in it is executed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from tokenizers import Tokenizer

from bei.artifact.manifest import CheckpointSource
from bei.artifact.store import sha256_of_file
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from bei.utils.libraries import importing
from bei_build.checkpoint import decoder_processor, gliner2, glirel
from bei_build.checkpoint.adapter_folder import with_base
from bei_build.checkpoint.adapter_prompts import with_adapters_prompt, with_task_prompts
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.colbert import Sides, roles_of
from bei_build.checkpoint.filled_texts import filling_id_of
from bei_build.checkpoint.gguf_folder import laid_out
from bei_build.checkpoint.gliclass import labelling_of
from bei_build.checkpoint.gliner import FILE as GLINER_CONFIG
from bei_build.checkpoint.gliner import extraction_of, gliner_config, own_tokens
from bei_build.checkpoint.gliner_folder import with_encoder
from bei_build.checkpoint.heads import HeadChoice, choose_heads, labels_of, reading_config, side_modules
from bei_build.checkpoint.laya import with_laya
from bei_build.checkpoint.layer_pooling import with_layer_shares
from bei_build.checkpoint.listwise import listwise_of
from bei_build.checkpoint.locate import READ_SUFFIXES, Location, check_entries
from bei_build.checkpoint.opendecider import head_modules, option_markers_of, with_opendecider
from bei_build.checkpoint.remote_code import (
    Attention,
    check_attention,
    check_remote_code,
    check_unread_attention,
    with_attention,
)
from bei_build.checkpoint.sentence_transformers import (
    SentenceTransformersFiles,
    StaticClass,
    read_sentence_transformers,
)
from bei_build.checkpoint.transformers_versions import check_other_files, check_versions
from bei_build.checkpoint.vector_settings import check_vectors
from bei_build.families.base import UNLIMITED, Family
from bei_build.families.gliner2 import MODEL_TYPE as GLINER2
from bei_build.families.static import usual_chars
from bei_build.families.table import family_of
from bei_build.files.foreign_formats import foreign_kind
from bei_build.files.json_settings import read_object
from bei_build.files.size_limits import check_sizes
from bei_build.spec.model_spec import ModelSpec
from bei_build.tokenizer.artifact_tokenizer import (
    artifact_tokenizer,
    drop_token_types,
    model_max_length,
    stored_truncation,
    unknown_id,
    without_rowless_tokens,
)
from bei_build.tokenizer.library_tokenizer import (
    TokenizerChoice,
    TokenizerSettings,
    check_model,
    open_tokenizer,
    stored_tokenizer,
    tokenization_of,
)
from bei_build.tokenizer.token_table import read_table, table_roles
from bei_build.weights.lora import choose_adapters
from bei_build.weights.model_weights import stored_shape, with_adapters, with_stored_widths
from bei_build.weights.onnx_file import SUFFIX as ONNX
from bei_build.weights.onnx_file import external_files
from bei_build.weights.packed_format import MODELOPT, StoredPacked, modelopt_packed, parse_packed
from bei_build.weights.peft_adapter import CONFIG as ADAPTER_CONFIG
from bei_build.weights.peft_adapter import PeftAdapter
from bei_build.weights.quantized_format import StoredFP8, algorithms_of, is_modelopt, parse_fp8_settings
from bei_build.weights.tensor_store import check_weights, weight_files

# How matrices are stored that are not 16- or 32-bit numbers.
_Quantized: TypeAlias = StoredFP8 | StoredPacked | None


def read_checkpoint(
    location: Location,
    choice: HeadChoice | None = None,
    max_seq_len: int | None = None,
    document_length: int | None = None,
    attention: Attention | None = None,
    adapter: str | None = None,
    tokenizer_choice: TokenizerChoice = "auto",
    route: str | None = None,
    loras: Mapping[str, Path] | None = None,
) -> Checkpoint:
    """Read config, sentence-transformers files and tokenizer. Arguments override the files' settings. ``loras``:
    folders of PEFT adapters by name.

    Raises CheckpointError and its subclasses, ConfigError.
    """
    location, merged = with_base(with_opendecider(with_laya(with_encoder(laid_out(location)))))
    check_entries(location.folder)
    files = read_sentence_transformers(location.folder, route)
    for module in files.folders:
        check_entries(module)
    folder = files.transformer_folder
    # Before libraries are imported, which takes seconds.
    check_weights(folder)
    stored = stored_tokenizer(folder)
    config, architecture, family, quantized = _config(folder, attention, files.static)
    chosen, adapters = choose_adapters(config, folder, adapter, loras or {}, merged)
    if adapters and adapters.tasks:
        files = with_task_prompts(files, getattr(config, "task_instructions", None))
    if chosen and chosen.names:
        files = with_adapters_prompt(files, chosen, getattr(config, "task_instructions", None))
    files = decoder_processor.with_prompts(files, family, scores_pairs=bool(choice and choice.score_tokens))
    spec = _spec(family, config, architecture)
    tokenizer_settings = TokenizerSettings(
        tokenizer_choice,
        files.tokenizer_args,
        is_static=not family.special_tokens,
        lowercase=files.do_lower_case,
        markers=files.markers,
        ends_in_eos=getattr(config, "ends_in_eos", False),
        added=(*own_tokens(config), *gliner2.own_tokens(config), *glirel.own_tokens(config)),
        model_type=family.model_type if hasattr(config, "gliner") or hasattr(config, "glirel") else "",
        around=decoder_processor.around_texts(folder, family),
    )
    library = open_tokenizer(folder, tokenizer_settings)
    check_model(stored, library, tokenizer_settings)
    tokenizer = artifact_tokenizer(library, tokenizer_settings, folder)
    tokenizer, rowless = without_rowless_tokens(tokenizer, stored, spec.embeddings.vocab_size)
    if spec.embeddings.type_vocab_size > 1 and not library.gives_token_types:
        drop_token_types(tokenizer)
    heads = choose_heads(family, config, architecture, files, choice or HeadChoice(), tokenizer)
    spec = replace(spec, heads=with_stored_widths(heads, family, folder))
    if files.layer_pooling and spec.head("embedding"):
        spec = with_layer_shares(spec, files.layer_pooling, config)
    if not family.has_layers:
        _refuse_other_than_means(spec)
    spec = replace(spec, pools_prompt=_pools_prompt(spec, files, choice or HeadChoice()))
    if not family.pools_unknown:
        spec = replace(spec, unpooled_id=unknown_id(tokenizer))
    _check_marked(spec, tokenizer)
    check_vectors(files, spec)
    if spec.head("logits") and not files.is_cross_encoder:  # the library's CrossEncoder ignores these prompts
        files = replace(files, prompts={}, default_prompt_name=None)
    files = replace(files, sides=_sides(files, spec, document_length))
    said = model_max_length(folder, files.tokenizer_args)
    usual = config.usual_length if hasattr(config, "usual_length") else said or family.usual_length
    longest = _longest(family, spec, config, files, usual, max_seq_len)
    check_attention(spec, attention, config, longest)
    if longest <= (special := tokenizer.num_special_tokens_to_add(is_pair=False)):
        raise CheckpointError(f"max_seq_len {longest} leaves no room beside the {special} special tokens of a text.")
    tokenization = decoder_processor.with_refused_text(
        tokenization_of(library), family, reads_images=spec.embeddings.reads_images
    )
    if family.fills_texts:
        spec = replace(spec, filling_id=filling_id_of(spec, library, tokenizer, folder, longest))
        tokenization = msgspec.structs.replace(tokenization, filling_id=spec.filling_id)
    if getattr(config, "cuts_chars", False):
        chars = usual_chars((stored or tokenizer).get_vocab())
        tokenization = msgspec.structs.replace(tokenization, chars_per_token=chars)
    if document_length is not None and document_length > longest:
        raise CheckpointError(f"document_length {document_length} is above max_seq_len {longest}: choose at most that.")
    roles = roles_of(files.sides, files.prompts, tokenizer, folder, longest)
    token_weights = None
    if files.routing and files.routing.table:
        _check_sparse(spec)
        side, table = files.routing.table
        roles, token_weights = table_roles(side, table), read_table(table, tokenizer, spec.embeddings.vocab_size)
    spec = replace(spec, partial_keys=any(role.expansion and not role.expansion.attended for role in roles.values()))
    modules, labels = side_modules(spec, files) | head_modules(folder), labels_of(spec, config, files, choice)
    fp8 = quantized if isinstance(quantized, StoredFP8) else None
    packed = quantized if isinstance(quantized, StoredPacked) else None
    if adapters:
        tied = bool(getattr(config, "tie_word_embeddings", True))
        spec = with_adapters(spec, family, folder, adapters, tied=tied, fp8=fp8, packed=packed)
    has_schema = hasattr(config, "gliner2")
    extracts = gliner2.extraction_of if has_schema else extraction_of
    extracts = glirel.extraction_of if hasattr(config, "glirel") else extracts
    return Checkpoint(
        location=location,
        files=files,
        family=family,
        spec=spec,
        tokenizer=tokenizer,
        tokenizer_settings=tokenizer_settings,
        tokenization=tokenization,
        rowless=rowless,
        max_seq_len=longest,
        labels=labels,
        modules=modules,
        config=config,
        roles=roles,
        adapter=chosen,
        adapters=adapters,
        fp8=fp8,
        packed=packed,
        token_weights=token_weights,
        extraction=extracts(spec, config, tokenizer),
        listwise=listwise_of(spec, tokenizer, longest, said),
        labelling=(gliner2.labelling_of if has_schema else labelling_of)(spec, config, tokenizer),
        option_markers=option_markers_of(spec, tokenizer, folder),
    )


def source_of(checkpoint: Checkpoint, labels: Checkpoint | None = None) -> CheckpointSource:
    """The manifest's record of the checkpoint, with its tower of ``labels``; hashes every file that was read."""
    folders = {checkpoint.location.folder, *checkpoint.files.folders}
    found = (path for folder in folders for suffix in READ_SUFFIXES for path in folder.glob(f"*{suffix}"))
    files = {path for path in found if path.is_file()}
    files.update(weights := weight_files(checkpoint.folder))
    files.update((checkpoint.folder / gliner2.ENCODER_FOLDER).glob("*.json"))
    files.update(beside for file in weights if file.suffix == ONNX for beside in external_files(file))
    beside = [module.location for module in checkpoint.modules.values()]
    if checkpoint.files.layer_pooling:
        beside.append(checkpoint.files.layer_pooling)
    if (routing := checkpoint.files.routing) and routing.table:
        beside.append(routing.table[1])
    for place in beside:
        files.update(weight_files(place) if place.is_dir() else [place])
    sha = hashlib.sha256()
    folder, adapters = checkpoint.location.folder, _adapter_files(checkpoint)
    named = {path.relative_to(folder).as_posix(): path for path in files if path not in adapters.values()}
    for path in labels.folder.iterdir() if labels else ():
        if path.suffix in READ_SUFFIXES:  # the weights are those of both
            named[f"labels/{path.name}"] = path
    for name, path in sorted({**named, **adapters}.items()):
        sha.update(f"{name} {sha256_of_file(path)}\n".encode())
    location = checkpoint.location
    return CheckpointSource(
        model=location.model,
        kind=location.kind,
        revision=location.revision,
        sha256=sha.hexdigest(),
        transformers=version("transformers"),
    )


def _adapter_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The files of adapters that PEFT saved, by the adapter's name and theirs: they may lie in any folder."""
    adapters = checkpoint.adapters.adapters.values() if checkpoint.adapters else (checkpoint.adapter,)
    found = {}
    for adapter in adapters:
        if adapter is not None and isinstance(adapter.factors, PeftAdapter):
            weights = adapter.factors.file
            for path in (weights.parent / ADAPTER_CONFIG, weights):
                found[f"adapters/{adapter.name}/{path.name}"] = path
    return found


def _config(
    folder: Path, attention: Attention | None, static: StaticClass | None
) -> tuple[Any, str, Family, _Quantized]:
    """The HF config (its class holds the defaults that config.json leaves out), the architecture's name, its family,
    and how matrices are stored."""
    raw = _raw_config(folder, static)
    quantized = _stored_format(folder, raw)
    path = folder / "config.json"
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str):
        raise CheckpointError(f'{path} does not name its architectures. Add the class, e.g. ["BertModel"].')
    # Before transformers, which would only report an unknown format.
    family = family_of(raw["model_type"], architecture, raw)
    check_remote_code(raw, family, architecture, attention)
    if static and family.has_layers:
        raise CheckpointError(
            f"modules.json asks for {static}, but {path} describes a {architecture}: the two are not from the "
            "same checkpoint. Download it again."
        )
    if family.stored_sizes:
        vocab_size, hidden_size = stored_shape("embeddings.word.weight", family, folder)
        raw = {**raw, "vocab_size": vocab_size, "hidden_size": hidden_size}
    # transformers warns without torch that models are not available; configs do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with importing("transformers", "cpu", "Reading a checkpoint"):
        from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
        from transformers.utils import logging
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its warnings are refused below, or harmless
    try:
        translated = family.translate(raw) if family.translate else raw
        check_sizes(path, translated)
        check_versions(translated)
        is_known = family.model_type in CONFIG_MAPPING  # static embeddings have no class there
        config_class = CONFIG_MAPPING[family.model_type] if is_known else PreTrainedConfig
        translated = with_attention(translated, attention, config_class)
        check_unread_attention(translated, family, architecture, attention, config_class)
        if is_known and translated is raw and raw["model_type"] == family.model_type:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        else:
            config = config_class.from_dict({**translated, "model_type": family.model_type})
    except CheckpointError:  # from translate and the checks after it
        raise
    except Exception as error:  # transformers validates with several exception types
        reason = " ".join(str(error).split())[:1000]
        raise CheckpointError(
            f"{path} was refused by transformers ({reason}). Download the checkpoint again."
        ) from error
    config.__dict__.pop("quantization_config", None)  # transformers cannot load this format
    # transformers would try to load this format, and fail
    config.return_dict, config.chunk_size_feed_forward = True, 0
    return config, architecture, family, quantized


def _raw_config(folder: Path, static: StaticClass | None) -> dict[str, Any]:
    """config.json, or its stand-in beside a static embedding."""
    path = folder / "config.json"
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{folder} holds an adapter, and is no checkpoint's own folder. Build the adapter's own.")
    if static and not path.is_file():
        return {**_STATIC[static], "usual_length": stored_truncation(folder)}
    if not path.is_file() and (found := gliner_config(folder) or glirel.glirel_config(folder)) is not None:
        check_sizes(folder / (glirel.FILE if "glirel" in found else GLINER_CONFIG), found)
        return found
    if not path.is_file():
        kind = foreign_kind(folder)
        raise CheckpointNotFoundError(
            f"{folder} has no config.json: it is not a Hugging Face checkpoint"
            + (f", but {kind}." if kind else ". Pass the folder that holds one.")
        )
    raw = read_object(path)
    check_sizes(path, raw)
    check_other_files(path, raw)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} does not name a model_type. Download the checkpoint again.")
    if raw["model_type"] == GLINER2:
        raw = gliner2.gliner2_config(folder, raw)
        check_sizes(path, raw)
    return raw


def _stored_format(folder: Path, raw: dict[str, Any]) -> _Quantized:
    """How matrices are quantized by the configs, None where none are. Raises CheckpointError for other formats."""
    settings = raw.get("quantization_config") or raw.get("compression_config")
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    own = read_object(path) if (path := folder / _MODELOPT_CONFIG).is_file() else None
    if is_modelopt(settings) or (own is not None and not method):
        sources = [each for each in (settings, own) if each]
        algorithms = algorithms_of(sources)
        if len(algorithms) == 1 and (algorithm := next(iter(algorithms))) in MODELOPT:
            return modelopt_packed(algorithm)
        return parse_fp8_settings(sources)
    for name, writer in _QUANTIZATION_CONFIGS.items():
        if not method and (folder / name).is_file():
            method, settings = writer, {**read_object(folder / name), "quant_method": writer}
    if isinstance(settings, dict) and (packed := parse_packed(settings)):
        return packed
    if method:
        raise CheckpointError(
            f"The checkpoint is quantized ({method}): build from the original 16- or 32-bit one; bei quantizes itself "
            "(--precision int8)."
        )
    return None


def _spec(family: Family, config: Any, architecture: str) -> ModelSpec:
    """The family's spec for ``config``. Raises CheckpointError."""
    with reading_config():
        spec = family.spec_from_config(config, architecture)
    if not spec.layers and family.has_layers:
        raise CheckpointError("config.json describes a model without layers. Download the checkpoint again.")
    return spec


def _refuse_other_than_means(spec: ModelSpec) -> None:
    """Raise ConfigError for other poolings of static embeddings, whose rows have seen no other tokens."""
    if any(head.pooling != ("mean",) for head in spec.heads):
        raise ConfigError(
            f"{spec.architecture} gives means of its table's rows, and nothing else: leave pooling and "
            "token_embeddings out."
        )


def _check_sparse(spec: ModelSpec) -> None:
    """Raise ConfigError where one side of a sparse retriever would be built as another kind of model."""
    if [head.output for head in spec.heads] != ["sparse"]:
        raise ConfigError(
            "One side of the checkpoint's Router is a table of weights (SparseStaticEmbedding), which goes with sparse "
            "vectors of the other: leave task, pooling and token_embeddings out, or build the other side alone with "
            "--route."
        )


def _pools_prompt(spec: ModelSpec, files: SentenceTransformersFiles, choice: HeadChoice) -> bool:
    """True if the prompt's tokens count in the mean, by the user's choice or the files. Raises CheckpointError."""
    asked = files.include_prompt if choice.include_prompt is None else choice.include_prompt
    if asked is False and files.gives_scores and files.is_cross_encoder and files.prompts:
        raise CheckpointError(
            "include_prompt is false, and a Dense gives scores of the mean: bei leaves prompts out of embeddings only."
        )
    head = spec.head("embedding")
    if head is None or asked is not False:
        return True
    if head.pooling != ("mean",):
        raise CheckpointError(
            f"include_prompt is false, and the pooling is {'+'.join(head.pooling)}: bei leaves prompts out of means "
            "only."
        )
    return False


def _check_marked(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError where the tokenizer does not add the marked token whose state the model reads."""
    if not any("last_marked" in head.pooling for head in spec.heads):
        return
    for text in (("a",), ("a", "b")):
        if spec.marked_id not in tokenizer.encode(*text).ids:
            raise CheckpointError(
                f"{spec.architecture} reads the state of the last token {spec.marked_id} (eos_token_id), which the "
                "tokenizer does not put behind a text. Download tokenizer.json again."
            )


def _sides(files: SentenceTransformersFiles, spec: ModelSpec, document_length: int | None) -> Sides:
    """Settings of the two sides for late interaction; empty for other models, whatever their files contain."""
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
    family: Family,
    spec: ModelSpec,
    config: Any,
    files: SentenceTransformersFiles,
    usual: int | None,
    asked: int | None,
) -> int:
    """Most tokens of a text. Relative and rotary positions reach as far as the config allows; a position table has a
    fixed number of rows.

    ``usual``: the default of the config, of the tokenizer's files or of the family. ``asked``: the user's.
    """
    table = min(spec.embeddings.longest or _position_limit(family, config), spec.longest or UNLIMITED)
    if asked is not None and asked > table:
        raise CheckpointError(
            f"max_seq_len {asked} is beyond the {table} positions of the checkpoint: choose at most that."
        )
    if files.max_seq_length is not None and files.max_seq_length < 1:
        raise CheckpointError(f"max_seq_length {files.max_seq_length} of the checkpoint's files must be at least 1.")
    # PyLate's max_seq_length is left over from its last call: its code sets it by the lengths of the two sides.
    lengths = [side.length for side in files.sides.values() if side.length is not None]
    return asked or min(table, max(files.max_seq_length or usual or table, *lengths, 0))


def _position_limit(family: Family, config: Any) -> int:
    """The longest text of a model without a position table. Raises CheckpointError where config.json must give it."""
    if not family.position_limit:
        return UNLIMITED
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise CheckpointError(
            f"config.json has max_position_embeddings = {limit!r}; bei's {family.model_type} family reads from it how "
            "long a text may be: set it to the number of tokens the model was trained with."
        )
    return limit


# Files in which quantizers store their settings if config.json does not have them.
_MODELOPT_CONFIG = "hf_quant_config.json"


_QUANTIZATION_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


# Stand-ins for the config.json that sentence-transformers does not write beside a static embedding.
_STATIC: Mapping[StaticClass, dict[str, Any]] = {
    "StaticEmbedding": {"model_type": "static_embedding", "architectures": ["StaticEmbedding"]},
    "SSE": {"model_type": "stable_static_embedding", "architectures": ["SSE"]},
}
