"""Validates the values of a manifest before they are used; those of a certificate: ``certificate_faults``.

Decoding checks their forms, and hashes show later changes; but the builder of an artifact writes both. This module
finds values that no build writes: a fault is a sentence that names the field and the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from bei.artifact.certificate.thresholds import PRECISIONS, PRECISIONS_OF_TARGETS
from bei.artifact.held_files import MOST_FILES
from bei.artifact.image_processor import MOST_REGISTERS, MOST_SIDE, processor_faults
from bei.artifact.image_sequence import MOST_IMAGES, ImageSequence
from bei.artifact.manifest import (
    LABEL_ENGINE_DIR,
    LABEL_TOKENIZER,
    LABELS_DIR,
    NO_ADAPTER,
    TOKENIZER,
    Adapters,
    EngineRequirements,
    ImageTower,
    Manifest,
    Package,
    Plan,
)
from bei.artifact.reading_faults import MOST_COUNT, MOST_TOKENS, reading_faults, repeated, shown
from bei.errors import ArtifactFileUnlistedError, ArtifactManifestError
from bei.printable import printable
from bei.utils.untrusted_files import (
    MOST_JSON_BYTES,
    MOST_TOKENIZER_BYTES,
    UnfitError,
    check_regular,
    unlisted,
    within,
)

# The outputs that serve each task: one of them is required.
OUTPUTS_OF: Mapping[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "embed_sparse": ("sparse", "token_weights"),
    "embed_tokens": ("token_embedding",),
    "classify": ("logits",),
    "rerank": ("logits", "token_projection"),
    "classify_tokens": ("token_logits",),
    "extract": ("span_logits",),
    "decide": ("logits", "token_likelihood", "option_logits"),
    "zero_shot": ("label_logits",),
}
_LABELLED = ("logits", "token_logits")
_OF_LABELS = ("span_logits", "label_logits", "option_logits", "relation_logits", "record_states")  # rows of tokens

# Limits for sizes of tables.
MOST_SEQUENCES = 1 << 20
_MOST_WIDTH = 1 << 24
_MOST_NAME_CHARS = 500

# The manifest cannot hold its own hash, nor that of its signature.
_UNLISTED = ("manifest.json", "signature.json")
# What else may lie in an artifact's root, unlisted: what people and systems put into every folder, and bei never reads.
_ALLOWED = re.compile(
    r"README\.md|LICENSE(\.(md|txt))?|NOTICE"  # of a model's repository
    r"|\.gitattributes|\.gitignore|\.git/.*|\.cache/.*"  # of git, and of a download from the hub
    r"|\.DS_Store|\.nfs[0-9a-f]+"  # of macOS's Finder; of NFS, where a file was removed that is open
    r"|\.\..*"  # of a volume of Kubernetes, whose files are links into ..data
    r"|\.(certificate|signature)\.[a-z0-9_]{8}/.*"  # of bei, while it replaces a certificate or a signature
)

# Fields of the image tower that are the manifest's own, where it has no other.
_OF_ITS_ENGINE = ("spec", "engine", "max_num_tokens", "max_batch_size", "max_seq_len")

_TABLE = "token_weights.npy"
_FLOAT_BYTES = 4
_MOST_HEADER_BYTES = 10_000  # numpy's own limit

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_OUTPUT = re.compile(r"[a-z][a-z0-9_]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LEAST_STEP = 1e-6  # of int8 vectors, times 127: a hundredth of what vectors of a million components have


def limits_fault(max_num_tokens: int, max_batch_size: int, max_seq_len: int) -> str | None:
    """The fault of a batch's limits, or None."""
    given = {
        "max_num_tokens": (max_num_tokens, MOST_TOKENS),
        "max_batch_size": (max_batch_size, MOST_SEQUENCES),
        "max_seq_len": (max_seq_len, MOST_TOKENS),
    }
    for name, (value, most) in given.items():
        if not 1 <= value <= most:
            return f"{name} is {shown(value)}, and must be from 1 to {most}"
    if max_seq_len > max_num_tokens:
        return f"max_num_tokens {max_num_tokens} cannot hold one sequence of max_seq_len {max_seq_len}"
    if max_batch_size > max_num_tokens:
        return f"max_batch_size {max_batch_size} is more than max_num_tokens {max_num_tokens} can hold"
    return None


def name_fault(name: str) -> str | None:
    """The fault of the ``name`` of a model, a prompt or a library, or None."""
    if not name.strip() or len(name) > _MOST_NAME_CHARS:
        return f"it has {len(name)} characters, and must have from 1 to {_MOST_NAME_CHARS}, not only blanks"
    if not name.isprintable():
        return f"{name[:80]!a} has characters that cannot be printed"
    return None


def adapter_fault(name: str) -> str | None:
    """The fault of the ``name`` of an adapter, or None: clients write it behind the model's name and a colon."""
    if name == NO_ADAPTER:
        return f"{name!r} stands for the weights without an adapter"
    if not _WORD.fullmatch(name):
        return f"{name[:80]!a} must be of up to 100 letters, digits, dots, dashes, underscores and plus signs"
    return None


def manifest_fault(manifest: Manifest) -> str | None:
    """The first fault of ``manifest``, or None."""
    parts = (
        _names,
        _tasks,
        _outputs,
        _heads,
        reading_faults,
        _prompts,
        _roles,
        _routes,
        _adapters,
        _engine,
        _filling,
        _images,
        _labels,
        _files,
    )
    limits = limits_fault(manifest.max_num_tokens, manifest.max_batch_size, manifest.max_seq_len)
    return limits or next(chain.from_iterable(part(manifest) for part in parts), None)


def check_files(path: Path, manifest: Manifest) -> None:
    """Check the files of the artifact at ``path`` before they are hashed: listed files must lie inside it, be regular
    and not too large for their kind, and no others may lie there but those of ``_ALLOWED``.

    Raises ArtifactManifestError, ArtifactFileUnlistedError.
    """
    most = {
        TOKENIZER: MOST_TOKENIZER_BYTES,
        LABEL_TOKENIZER: MOST_TOKENIZER_BYTES,
        "certificate.json": MOST_JSON_BYTES,
        _TABLE: _MOST_HEADER_BYTES + _FLOAT_BYTES * manifest.spec.vocab_size,
    }
    for info in manifest.files:
        try:
            check_regular(within(path, info.path), most.get(info.path))
        except UnfitError as error:
            raise ArtifactManifestError(
                f"{path} lists the file {info.path[:80]!a}, which bei does not read: {error}. Copy the artifact anew "
                "from its source, or build it again."
            ) from error
    listed = [*_UNLISTED, *(info.path for info in manifest.files)]
    found = chain(
        unlisted(path, listed),
        *(_in_linked(path, folder, listed) for folder in ("engine", "image_engine", LABELS_DIR, "reference")),
    )
    if extra := next((name for name in found if not _ALLOWED.fullmatch(name)), None):
        raise ArtifactFileUnlistedError(
            f"{path} has a file {printable(extra)!a} that its manifest does not list, so that no hash and no signature "
            "covers it: delete it or keep it elsewhere, or copy the artifact anew from its source."
        )


def _in_linked(path: Path, folder: str, listed: Sequence[str]) -> Iterator[str]:
    """Unlisted files in ``folder`` of the artifact at ``path`` where it is a link: ``unlisted`` does not follow it."""
    if (path / folder).is_symlink():
        names = [name.removeprefix(f"{folder}/") for name in listed if name.startswith(f"{folder}/")]
        yield from (f"{folder}/{name}" for name in unlisted(path / folder, names))


def _names(manifest: Manifest) -> Iterator[str]:
    versions = (("bei_version", manifest.bei_version), ("source.transformers", manifest.source.transformers))
    for field, value in (("name", manifest.name), *versions):
        if fault := name_fault(value):
            yield f"{field}: {fault}"
    for field, value in (("target", manifest.target), ("precision", manifest.precision)):
        if not _WORD.fullmatch(value):
            yield f"{field} is {shown(value)}, which is no name"
    if manifest.precision not in PRECISIONS:
        yield f"precision is {shown(manifest.precision)}, and must be one of {', '.join(PRECISIONS)}"
    built = PRECISIONS_OF_TARGETS.get(manifest.target, PRECISIONS)  # a newer bei may have further targets
    if manifest.precision in PRECISIONS and manifest.precision not in built:
        yield f"precision is {manifest.precision}, which the target {manifest.target} does not have: {', '.join(built)}"
    spec = manifest.spec
    for field in ("num_layers", "hidden_size", "num_heads", "vocab_size", "num_parameters"):
        least = 1 if field in ("hidden_size", "vocab_size") else 0
        most = 1 << 62 if field == "num_parameters" else MOST_COUNT
        if not least <= (value := getattr(spec, field)) <= most:
            yield f"spec.{field} is {shown(value)}, and must be from {least} to {most}"


def _tasks(manifest: Manifest) -> Iterator[str]:
    if not manifest.tasks:
        yield "tasks is empty: it serves nothing"
    yield from repeated("tasks", manifest.tasks)
    outputs = {output.name for output in manifest.outputs}
    for task in manifest.tasks:
        if task not in OUTPUTS_OF:
            yield f"tasks has {shown(task)}, and each must be one of {', '.join(OUTPUTS_OF)}"
        elif outputs.isdisjoint(OUTPUTS_OF[task]):
            yield f"the task {task} reads {' or '.join(OUTPUTS_OF[task])}, which the engine does not give"


def _outputs(manifest: Manifest) -> Iterator[str]:
    if not manifest.outputs:
        yield "outputs is empty: the engine gives nothing"
    yield from repeated("outputs", [output.name for output in manifest.outputs])
    for output in manifest.outputs:
        if not _OUTPUT.fullmatch(output.name):
            yield f"outputs has {shown(output.name)}, which is no name of an output"
        if not 1 <= output.dimension <= _MOST_WIDTH:
            yield f"{output.name} has the dimension {shown(output.dimension)}, and it must be from 1 to {_MOST_WIDTH}"
        if output.name in _OF_LABELS or output.name in chain.from_iterable(OUTPUTS_OF.values()):
            is_token = output.name.startswith("token_") or output.name in _OF_LABELS
            if output.per_token != is_token:
                yield f"{output.name} has a row a {'token' if is_token else 'sequence'}, not a {_row(output.per_token)}"


def _row(per_token: bool) -> str:
    return "token" if per_token else "sequence"


def _heads(manifest: Manifest) -> Iterator[str]:
    """Faults of settings without their output, and of outputs without their settings."""
    embedding, classification = manifest.embedding, manifest.classification
    if (embedding is not None) != (manifest.dimension("embedding") is not None):
        yield "embedding and the output of this name must both be there, or neither"
    if embedding is not None:
        if any(dimension < 1 for dimension in embedding.matryoshka_dimensions or ()):
            yield (
                f"matryoshka_dimensions has {shown(min(embedding.matryoshka_dimensions or ()))}, and each must be "
                "at least 1"
            )
        if embedding.int8_largest is not None and not _LEAST_STEP <= embedding.int8_largest <= 1:
            yield f"int8_largest is {embedding.int8_largest}, which is no component of vectors of unit length"
    labelled = next((output for output in manifest.outputs if output.name in _LABELLED), None)
    if labelled and (classification is None or len(classification.labels) != labelled.dimension):
        count = "no" if classification is None else len(classification.labels)
        yield f"{labelled.name} has {labelled.dimension} columns, and classification has {count} labels"
    if classification is not None and labelled is None:
        yield "classification has labels, and no output has scores"


def _prompts(manifest: Manifest) -> Iterator[str]:
    for name in manifest.prompts:
        if name and not name.isprintable():
            yield f"prompts has the name {shown(name)}, which cannot be printed"
    if manifest.default_prompt_name is not None and manifest.default_prompt_name not in manifest.prompts:
        yield f"default_prompt_name {shown(manifest.default_prompt_name)} is not among the prompts"


def _roles(manifest: Manifest) -> Iterator[str]:
    for side, role in manifest.roles.items():
        if role.max_tokens is not None and not 1 <= role.max_tokens <= MOST_COUNT:
            yield f"the role {side} has max_tokens {shown(role.max_tokens)}, which must be from 1 to {MOST_COUNT}"
        if any(not 0 <= token < MOST_COUNT for token in role.skip_ids):
            yield f"the role {side} skips a token id that is negative or too large"
        if role.table and manifest.dimension("sparse") is None:
            yield f"the role {side} has a table of weights, and the model gives no sparse vectors"
        if role.table and all(info.path != _TABLE for info in manifest.files):
            yield f"the role {side} has a table of weights, and files has no {_TABLE}"
        expansion = role.expansion
        if expansion is None:
            continue
        if not 1 <= expansion.num_tokens <= manifest.max_seq_len:
            yield f"the role {side} is filled up to {shown(expansion.num_tokens)} tokens, beyond max_seq_len"
        if not 0 <= expansion.token_id < manifest.spec.vocab_size:
            yield f"the role {side} is filled up with token {shown(expansion.token_id)}, which is in no vocabulary"
        if expansion.padding_id is not None and not 0 <= expansion.padding_id < manifest.spec.vocab_size:
            yield f"the role {side} has the padding {shown(expansion.padding_id)}, which is in no vocabulary"


def _routes(manifest: Manifest) -> Iterator[str]:
    routes = manifest.routes
    if routes is None:
        return
    for name in (*routes.absent, *([] if routes.default is None else [routes.default])):
        if fault := name_fault(name):
            yield f"routes: {fault}"
    if routes.default in routes.absent:
        yield f"the default route {shown(routes.default)} is absent"


def _adapters(manifest: Manifest) -> Iterator[str]:
    names = manifest.adapter_names
    yield from repeated("adapters", list(names))
    for name in names:
        if fault := adapter_fault(name):
            yield f"adapters: {fault}"
    if not isinstance(adapters := manifest.adapters, Adapters):
        return
    if not names:
        yield "adapters has no names"
    if missing := [task for task in adapters.tasks if task not in names]:
        yield f"adapters has the task {shown(missing[0])}, which is none of its names"


def _engine(manifest: Manifest) -> Iterator[str]:
    yield from _requirements(manifest.engine, reads_texts=manifest.reads_texts)


def _requirements(engine: EngineRequirements, *, reads_texts: bool) -> Iterator[str]:
    for word in (engine.compiler, engine.compiler_version, engine.device, *engine.capabilities):
        if fault := name_fault(word):
            yield f"engine: {fault}"
    if engine.plan is not None:
        yield from _plan(engine.plan)
    if engine.package is not None:
        yield from _package(engine.package, reads_texts=reads_texts)


def _plan(plan: Plan) -> Iterator[str]:
    yield from repeated("the plan's profiles", [profile.name for profile in plan.profiles])
    for profile in plan.profiles:
        for field in ("tokens", "sequences", "longest"):
            least, usual, most = getattr(profile, field)
            if not 1 <= least <= usual <= most <= MOST_TOKENS:
                yield (
                    f"the plan's profile {shown(profile.name)} has {field} {least}, {usual}, {most}, which must "
                    f"ascend from 1 to {MOST_TOKENS} at most"
                )


def _package(package: Package, *, reads_texts: bool) -> Iterator[str]:
    if package.cuda is not None and (fault := name_fault(package.cuda)):
        yield f"the package's cuda: {fault}"
    yield from repeated("the package's inputs", package.inputs)
    wanted = "input_ids" if reads_texts else "pixel_levels_"
    if not any(name.startswith(wanted) for name in package.inputs):
        yield f"the package's inputs have no {wanted.rstrip('_')}: it reads no {'text' if reads_texts else 'image'}"
    if not 0 <= package.weight_bytes < 1 << 62:
        yield f"the package has weight_bytes {shown(package.weight_bytes)}, which is not a possible size"


def _filling(manifest: Manifest) -> Iterator[str]:
    token = None if manifest.tokenization is None else manifest.tokenization.filled_with
    if token is not None and not 0 <= token < manifest.spec.vocab_size:
        yield f"tokenization.filling_id is {shown(token)}, which the model has no row for"
    chars = None if manifest.tokenization is None else manifest.tokenization.chars_per_token
    if isinstance(chars, int) and chars < 1:
        yield f"tokenization.chars_per_token is {shown(chars)}, which leaves nothing of a text"


def _images(manifest: Manifest) -> Iterator[str]:
    tower = manifest.image_tower
    if tower is None:
        if not manifest.reads_texts:
            yield "tokenization and images are both missing: the model reads nothing"
        return
    if fault := limits_fault(tower.max_num_tokens, tower.max_batch_size, tower.max_seq_len):
        yield f"images: {fault}"
    yield from (f"images.processor: {fault}" for fault in processor_faults(tower.processor))
    patch, (height, width) = tower.patch_size, tower.image_size
    if patch < 1 or not all(1 <= side <= MOST_SIDE and side % patch == 0 for side in (height, width)):
        yield f"images has patches of {shown(patch)} pixels in {shown(height)} x {shown(width)}"
    elif not _has_tokens(tower, (height // patch) * (width // patch) + tower.num_leading):
        yield f"images.max_seq_len is {shown(tower.max_seq_len)}, which is not the number of an image's patches"
    if isinstance(tower.registers, int) and not 1 <= tower.registers <= MOST_REGISTERS:
        yield f"images.registers is {shown(tower.registers)}: it must be from 1 to {MOST_REGISTERS}"
    if tower.processor.output_size not in (None, tower.image_size):
        yield "images.processor makes images of another size than image_size"
    if tower.sequence:
        yield from _sequence(manifest, tower, tower.sequence)
    elif "embed" not in manifest.tasks:
        yield "images is set, and the model does not embed"
    yield from (f"images: {fault}" for fault in _requirements(tower.engine, reads_texts=False))
    if not manifest.reads_texts:
        if any(getattr(tower, field) != getattr(manifest, field) for field in _OF_ITS_ENGINE):
            yield "images describes another engine than the manifest, whose only one it is"
    elif not any(info.path.startswith("image_engine/") for info in manifest.files):
        yield "files has nothing in image_engine/"


def _sequence(manifest: Manifest, tower: ImageTower, sequence: ImageSequence) -> Iterator[str]:
    kinds = (["rerank"], ["embed"]) if sequence.around else (["embed_tokens"], ["embed"])
    if manifest.tasks not in kinds or not manifest.reads_texts:
        yield "images.sequence is set, and the model does not embed texts, embed their tokens or score pairs alone"
    if manifest.tasks == ["rerank"] and manifest.rerank_template is None:
        yield "images.sequence is of pairs, and there is no rerank_template"
    ids = (*sequence.before, sequence.token_id, *sequence.after)
    if not all(0 <= index < manifest.spec.vocab_size for index in ids):
        yield "images.sequence has a token that the model has no row for"
    if tower.num_tokens > manifest.max_seq_len:
        yield f"images.sequence makes {shown(tower.num_tokens)} tokens, more than max_seq_len"
    if not 1 <= sequence.width <= _MOST_WIDTH:
        yield f"images.sequence.width is {shown(sequence.width)}, which is no width of a model"
    if sequence.most_images and (not sequence.around or not 1 <= sequence.most_images <= MOST_IMAGES):
        yield f"images.sequence.most_images is {shown(sequence.most_images)}, which no input has"
    resized, side = tower.processor.by_pixels, sequence.side
    if not 1 <= side <= MOST_SIDE or (tower.num_leading and side > 1):
        yield f"images.sequence.merged_side is {shown(side)}, of which no block of patches is"
    if (side > 1 or resized) and (resized is None or resized.multiple != side * tower.patch_size):
        yield "images.sequence merges patches that images are not cut into"


def _labels(manifest: Manifest) -> Iterator[str]:
    tower = manifest.label_tower
    if tower is None:
        return
    if manifest.tasks != ["extract"] or manifest.image_tower is not None or not manifest.reads_texts:
        yield "labels is set, and the model does not extract alone"
        return
    if fault := limits_fault(tower.max_num_tokens, tower.max_batch_size, tower.max_seq_len):
        yield f"labels: {fault}"
    own = manifest.of_second
    if [one.name for one in tower.outputs] != ["embedding"] or not 1 <= tower.outputs[0].dimension <= _MOST_WIDTH:
        yield "labels.outputs must be one embedding"
    yield from (f"labels: {fault}" for part in (_names, _engine) for fault in part(own))
    paths = [info.path for info in manifest.files]
    if LABEL_TOKENIZER not in paths:
        yield f"files has no {LABEL_TOKENIZER}"
    if not any(path.startswith(f"{LABEL_ENGINE_DIR}/") for path in paths):
        yield f"files has nothing in {LABEL_ENGINE_DIR}/"


def _has_tokens(tower: ImageTower, num_tokens: int) -> bool:
    """True if images have ``num_tokens``, or up to a maximum which holds these."""
    if (resized := tower.processor.by_pixels) and resized.multiple % tower.patch_size:
        return False
    if most := tower.processor.most_patches(tower.patch_size):
        return num_tokens <= tower.max_seq_len == most + tower.num_leading
    return tower.max_seq_len == num_tokens


def _files(manifest: Manifest) -> Iterator[str]:
    yield from repeated("files", [info.path for info in manifest.files])
    if len(manifest.files) > MOST_FILES:
        yield f"files has {len(manifest.files)} entries, more than the {MOST_FILES} that a server holds open"
    for info in manifest.files:
        if any(part in ("", ".") for part in info.path.split("/")) or info.path in _UNLISTED:
            yield f"files has {shown(info.path)}, which is no path of a file"
        if not 0 <= info.size < 1 << 62 or not _SHA256.fullmatch(info.sha256):
            yield f"files has {shown(info.path)} with an invalid size or sha256"
    if not any(info.path.startswith("engine/") for info in manifest.files):
        yield "files has nothing in engine/"
