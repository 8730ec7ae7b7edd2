"""THE CONTRACT between ``bei build`` and ``bei serve``: a directory, described by its manifest.

    manifest.json      what the artifact is; every other file with size and sha256
    tokenizer.json     the tokenizer, ready to use (truncation and padding off)
    token_weights.npy  a weight for each token, where a side's sparse vectors are looked up (bei.token_weights)
    certificate.json   how far the engine is from the reference (bei.certification)
    certificate.html   the same as a page for people
    engine/            the compiled engine, files named by the target
    reference/         answers of a reference, where the engine could not be verified yet (bei.certification.stored)
    signature.json     whose signature the manifest has (bei.signatures), where somebody has signed it

``load`` checks schema, digest, signature and hashes before anything of the artifact is executed. No pickle anywhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from bei.artifact.certificate.page import certificate_page
from bei.artifact.certificate.record import Agreement as Agreement
from bei.artifact.certificate.record import Certificate as Certificate
from bei.artifact.certificate.record import Histogram as Histogram
from bei.artifact.certificate.record import LayerSensitivity as LayerSensitivity
from bei.artifact.certificate.record import QuantizationRecord as QuantizationRecord
from bei.artifact.certificate.record import RetrievalAgreement as RetrievalAgreement
from bei.artifact.certificate.record import Thresholds as Thresholds
from bei.artifact.certificate.record import TokenAgreement as TokenAgreement
from bei.artifact.certificate.record import Verification as Verification
from bei.artifact.certificate.record import WorstText as WorstText
from bei.artifact.sides import SIDES as SIDES
from bei.artifact.sides import Role as Role
from bei.artifact.sides import Routes as Routes
from bei.artifact.sides import Side as Side
from bei.artifact.signature import Signed, read_signature, write_signature
from bei.artifact.validation import certificate_fault, check_files, manifest_fault
from bei.core import Limits, ScoreFunction
from bei.errors import (
    ArtifactFileMissingError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSchemaNewerError,
)
from bei.utils.untrusted_files import MOST_JSON_BYTES, UnfitError, read_bounded, unique_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA_VERSION = 10

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKEN_WEIGHTS = "token_weights.npy"
CERTIFICATE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"
ENGINE_DIR = "engine"
REFERENCE_DIR = "reference"
OPENVINO_MODEL = "model.xml"  # in engine/, target cpu; its weights are model.bin
TENSORRT_PLAN = "model.plan"  # in engine/, targets tensorrt and tensorrt-rtx
TENSORRT_GRAPH = "model.onnx"  # beside a plan without weights: where the engine takes them from
CUDA_PACKAGE = "model.pt2"  # in engine/, targets cuda and cuda-twin


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the weights came from. ``sha256`` covers every checkpoint file that was read; ``transformers`` is the
    version of the library that has read them: where versions differ, what it makes of a config counts.
    """

    model: str
    kind: str
    revision: str | None
    sha256: str
    transformers: str


class OutputInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output of the engine. ``dimension`` is the width of a row; there is a row a sequence, or ``per_token``.

    ``unit_length``: rows are made so before they are answered (late interaction; embeddings have their own setting).
    """

    name: str
    dimension: int
    per_token: bool = False
    unit_length: bool = False


class SpecSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model in figures, for people.

    ``attention``: which tokens see each other, None where there are no layers, or an encoder's and a decoder's;
    ``attention_asked``: the build was told so, by somebody who knows the code that the checkpoint brings along.
    ``adapter``: the one of several that was merged into the weights ("none": none was); None where there are none.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    num_parameters: int
    attention: Literal["causal", "bidirectional"] | None
    attention_asked: bool
    adapter: str | None = None


class PlanProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes that an optimization profile of a plan holds, each as least, usual, most.

    ``tokens`` T of a batch, ``sequences`` B, ``longest`` S, tokens of the longest sequence; after ``bei.engine.packing`` has
    filled them up.
    """

    name: str
    tokens: tuple[int, int, int]
    sequences: tuple[int, int, int]
    longest: tuple[int, int, int]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a TensorRT plan was compiled.

    ``lowerings``: how each attention layer is written (docs/architecture.md, "The packed graph"), in order.
    ``fallbacks``: what was asked for or tried and could not be had, a sentence each. ``refit``: the plan holds no
    weights, and the engine puts those of the ONNX file beside it into it when it is loaded.
    """

    lowerings: list[Literal["packed", "padded", "masked", "primitive"]]
    fallbacks: list[str]
    profiles: list[PlanProfile]
    hardware_compatible: bool = False
    refit: bool = False


class Package(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a package of AOTInductor was compiled.

    ``cuda``: CUDA's version in the PyTorch that compiled it; None for a CPU. ``inputs``: the tensors that it takes, by
    their names in ``bei.engine.packing.graph_inputs``, in order. ``kernels``: that of each attention layer, in order.
    ``fallbacks``: why a layer has no faster one, a sentence each. ``weight_bytes``: what the weights take of the
    device's memory.
    """

    cuda: str | None
    inputs: list[str]
    kernels: list[Literal["flash", "ragged", "plain"]]
    fallbacks: list[str]
    weight_bytes: int


class EngineRequirements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine needs of a machine. ``capabilities`` uses the compiler's own words (``BF16``, ``SM89``) and, for
    CPUs, ``EXACT_INT8`` (``bei.engine.cpu_features``): a CPU needs all of them, a GPU is one of them. ``unit_vectors``:
    the engine itself makes embeddings unit length, so that their own lengths cannot be had."""

    compiler: str
    compiler_version: str
    device: str
    capabilities: list[str]
    plan: Plan | None = None
    package: Package | None = None
    unit_vectors: bool = False


class FileInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the artifact, path relative to its root."""

    path: str
    size: int
    sha256: str


class Embedding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the embedding output is to be treated, as the checkpoint's own files say.

    ``int8_largest``: the component that is 127 in vectors of bytes (``bei.artifact.int8``), by the held-out texts; None
    where the build was not verified, and so had no answers to them. ``layers_follow_pooling``: whether the embedding is
    made of the pooled states by further layers (Dense modules); not set where an earlier bei has built the artifact,
    so that its manifest is still read and has the same digest.
    """

    pooling: str
    normalize: bool
    similarity: str | None
    matryoshka_dimensions: list[int] | None
    int8_largest: float | None
    pools_prompt: bool = True
    layers_follow_pooling: bool | msgspec.UnsetType = msgspec.UNSET


class Tokenization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokenizer.json was made, and how texts are read with it.

    ``library`` and ``tokenizer_class`` made it of the checkpoint's files; "tokenizer.json" is no class: the file was
    taken as it stood. ``truncation_side``: what a text loses that is too long, where a request does not say.
    ``splits_special_tokens``: special tokens that a text contains are split as other text is.
    """

    library: str
    tokenizer_class: str
    truncation_side: Literal["left", "right"] = "right"
    splits_special_tokens: bool = False


class Classification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the columns of ``logits`` or ``token_logits`` mean, and the ``function`` that makes scores of them."""

    labels: list[str]
    function: ScoreFunction

    @property
    def relevance(self) -> ScoreFunction:
        """What makes a reranker's score of its logit: ``function``, or the sigmoid where that makes none of one."""
        return "sigmoid" if self.function in ("none", "softmax") else self.function


class RerankTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a language model is asked about a pair: ``prefix``, ``body`` and ``suffix`` are tokenized one by one.

    The body has the slots {query}, {document} and {instruction}; only its tokens are cut where a pair is too long.
    """

    prefix: str
    body: str
    suffix: str
    instruction: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the runtime knows about a model. ``verification`` is the certificate's kind."""

    schema_version: int
    bei_version: str
    name: str
    source: Source
    tasks: list[str]
    spec: SpecSummary
    outputs: list[OutputInfo]
    embedding: Embedding | None
    classification: Classification | None
    rerank_template: RerankTemplate | None
    tokenization: Tokenization
    prompts: dict[str, str]
    default_prompt_name: str | None
    roles: dict[Side, Role]
    target: str
    precision: str
    engine: EngineRequirements
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    verification: Verification
    files: list[FileInfo]
    routes: Routes | None = None
    digest: str = ""

    @property
    def limits(self) -> Limits:
        """What one batch may hold."""
        return Limits(self.max_num_tokens, self.max_batch_size, self.max_seq_len)

    def dimension(self, output: str) -> int | None:
        """Width of ``output``, None if the model has no such output."""
        for info in self.outputs:  # several times a request: a generator shows in profiles
            if info.name == output:
                return info.dimension
        return None


class Artifact(msgspec.Struct, frozen=True):
    """A verified artifact on disk. ``signed``: by whom; None: by nobody."""

    path: Path
    manifest: Manifest
    certificate: Certificate
    signed: Signed | None = None

    @property
    def engine_dir(self) -> Path:
        """Folder of the target's own files."""
        return self.path / ENGINE_DIR


def _encode(record: Manifest | Certificate) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def certificate_html(manifest: Manifest, certificate: Certificate) -> str:
    """``certificate.html``."""
    source, engine = manifest.source, manifest.engine
    facts = [
        ("Model", f"{source.model}, {source.revision}" if source.revision else source.model),
        ("Architecture", manifest.spec.architecture),
        ("Target and precision", f"{manifest.target}, {manifest.precision}"),
        ("Compiler", f"{engine.compiler} {engine.compiler_version}"),
        ("Checkpoint SHA-256", source.sha256),
        ("Built by", f"bei {manifest.bei_version}"),
    ]
    return certificate_page(manifest.name, facts, certificate)


def _certificate_files(manifest: Manifest, certificate: Certificate) -> dict[str, bytes]:
    """Contents of the files that a new certificate replaces, by their names."""
    page = certificate_html(manifest, certificate)
    return {CERTIFICATE: _encode(certificate), CERTIFICATE_PAGE: page.encode()}


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(_encode(msgspec.structs.replace(manifest, digest=""))).hexdigest()


def _sealed(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, digest=_digest(manifest))


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def save(path: Path, manifest: Manifest, certificate: Certificate) -> Artifact:
    """Complete the artifact at ``path``: write the certificate and its page, list and hash all files, write the
    manifest last.

    Tokenizer and engine files are there already. A directory without a manifest is not an artifact, so a build
    that was interrupted cannot be served.
    """
    for name, content in _certificate_files(manifest, certificate).items():
        (path / name).write_bytes(content)
    files = [
        FileInfo(path=file.relative_to(path).as_posix(), size=file.stat().st_size, sha256=sha256_of_file(file))
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    ]
    manifest = _sealed(msgspec.structs.replace(manifest, files=files, verification=certificate.kind))
    temporary = path / (MANIFEST + ".partial")
    temporary.write_bytes(_encode(manifest))
    os.replace(temporary, path / MANIFEST)
    return Artifact(path, manifest, certificate)


def recertify(artifact: Artifact, certificate: Certificate) -> Artifact:
    """Put ``certificate`` and its page into the artifact on disk in the place of its own, and seal it again. Raises
    OSError.

    One process at a time; where two have the same artifact, the later certificate stays. Each file is replaced at once,
    manifest last: a process that is killed in between leaves an artifact that says that its certificate is another
    one, and has to be copied anew. Not for a signed artifact: its signature would be of another manifest.
    """
    assert artifact.signed is None, "whoever completes certificates asks first"
    contents = _certificate_files(artifact.manifest, certificate)
    new = {
        name: FileInfo(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    files = [new.get(info.path, info) for info in artifact.manifest.files]
    manifest = _sealed(msgspec.structs.replace(artifact.manifest, files=files, verification=certificate.kind))
    with _alone(artifact.path), tempfile.TemporaryDirectory(prefix=".certificate.", dir=artifact.path) as scratch:
        contents[MANIFEST] = _encode(manifest)  # the last to be replaced
        for name, content in contents.items():
            (Path(scratch) / name).write_bytes(content)
        for name in contents:
            os.replace(Path(scratch) / name, artifact.path / name)
    return msgspec.structs.replace(artifact, manifest=manifest, certificate=certificate)


def sign(artifact: Artifact, key: Ed25519PrivateKey) -> Artifact:
    """Sign the artifact on disk, in the place of the signature that it may have. Raises OSError."""
    signed = write_signature(artifact.path, artifact.manifest.digest, key)
    return msgspec.structs.replace(artifact, signed=signed)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes that want the same of ``folder`` waiting."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# What reading a record of ours raises: not JSON, another form, too large (ValueErrors), nested deeper than the parser.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


def is_artifact(path: Path) -> bool:
    """Whether ``path`` looks like an artifact (it may still be damaged)."""
    return (path / MANIFEST).is_file()


def load_manifest(path: Path) -> Manifest:
    """Read and check the manifest alone; files are not hashed.

    Raises ArtifactFileMissingError, ArtifactSchemaNewerError, ArtifactManifestError, ArtifactHashMismatchError.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactFileMissingError(f"{path} is not an artifact: it has no {MANIFEST}. Make one with 'bei build'.")
    try:
        raw = read_bounded(file)
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("schema_version")
        schema_version = msgspec.json.decode(version, type=int) if version is not None else 0
        if schema_version > SCHEMA_VERSION:
            raise ArtifactSchemaNewerError(
                f"{path} has artifact schema {schema_version}, this bei reads up to {SCHEMA_VERSION}: "
                "upgrade bei, or build the artifact again with this one."
            )
        if schema_version < SCHEMA_VERSION:
            raise UnfitError(f"it has schema {schema_version}")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except _UNREADABLE as error:
        raise ArtifactManifestError(
            f"{file} is not a manifest of schema {SCHEMA_VERSION} ({error}). Build the artifact again."
        ) from error
    if _encode(manifest) != raw or manifest.digest != _digest(manifest):
        raise ArtifactHashMismatchError(
            f"{file} was changed after the build. Build the artifact again, or copy it anew from its source."
        )
    if fault := manifest_fault(manifest):
        raise ArtifactManifestError(f"{file} says what cannot be: {fault}. Build the artifact again.")
    return manifest


def _has_certificate_of(path: Path, manifest: Manifest) -> bool:
    listed = {info.path: info for info in manifest.files}
    for name in (CERTIFICATE, CERTIFICATE_PAGE):
        file, said = path / name, listed.get(name)
        if said is None or said.size > MOST_JSON_BYTES or not file.is_file() or file.stat().st_size != said.size:
            return False
        if sha256_of_file(file) != said.sha256:
            return False
    return True


def load(path: Path) -> Artifact:
    """Verify the artifact at ``path`` (manifest, signature, then every file's size and sha256) and return it.

    Every file is hashed once. Raises what ``load_manifest`` raises, ArtifactFileMissingError, ArtifactSignatureError,
    ArtifactFileUnlistedError and ArtifactHashMismatchError.
    """
    manifest = load_manifest(path)
    hashed: tuple[str, ...] = (CERTIFICATE, CERTIFICATE_PAGE)
    if not _has_certificate_of(path, manifest):
        with _alone(path):  # another process may be putting a new one there at this moment
            manifest, hashed = load_manifest(path), ()
    signed = read_signature(path, manifest.digest)
    check_files(path, manifest)
    for info in manifest.files:
        if info.path in hashed:
            continue
        file = path / info.path
        if not file.is_file():
            raise ArtifactFileMissingError(
                f"{path} has lost {info.path}. Copy the artifact anew from its source, or build it again."
            )
        if file.stat().st_size != info.size or sha256_of_file(file) != info.sha256:
            raise ArtifactHashMismatchError(
                f"{file} is not the file that was built (size or sha256 differs). "
                "Copy the artifact anew from its source, or build it again."
            )
    listed = {info.path for info in manifest.files}
    for required in (TOKENIZER, CERTIFICATE, CERTIFICATE_PAGE):
        if required not in listed:
            raise ArtifactManifestError(f"{path / MANIFEST} does not list {required}. Build the artifact again.")
    certificate = _certificate_of(path, manifest)
    return load(path) if certificate is None else Artifact(path, manifest, certificate, signed)


def _certificate_of(path: Path, manifest: Manifest) -> Certificate | None:
    """None where another process has put a new one there since the files were hashed."""
    file = path / CERTIFICATE
    try:
        raw = read_bounded(file)
        said = next(info.sha256 for info in manifest.files if info.path == CERTIFICATE)
        if hashlib.sha256(raw).hexdigest() != said:
            return None
        json.loads(raw, object_pairs_hook=unique_keys)  # the decoder takes the last of two values
        certificate = msgspec.json.decode(raw, type=Certificate)
    except _UNREADABLE as error:
        raise ArtifactManifestError(f"{file} cannot be read ({error}). Build it again.") from error
    if fault := certificate_fault(manifest, certificate):
        raise ArtifactManifestError(f"{file} says what cannot be: {fault}. Build it again.")
    return certificate
