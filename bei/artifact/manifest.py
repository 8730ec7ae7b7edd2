"""The contract between ``bei build`` and ``bei serve``: an artifact is a directory described by its manifest.

    manifest.json      the artifact's facts; every other file with size and sha256
    tokenizer.json     the tokenizer, ready to use (truncation and padding off), if the model reads texts
    token_weights.npy  a weight for each token, if sparse vectors of a side are looked up (bei.artifact.token_weights)
    certificate.json   the engine's agreement with the reference (bei.artifact.certificate)
    certificate.html   the same as a page
    engine/            the compiled engine, files named by the target
    image_engine/      the engine of images, if the model reads texts and images
    labels/            tokenizer.json and engine/ of the tower of labels, if labels have one of their own
    reference/         reference answers, if the engine is not verified yet (bei.verification.stored_answers)
    signature.json     the signature of the manifest, if it is signed (bei.artifact.signature)

``bei.artifact.store.load`` checks schema, digest, signature and hashes before any part is used, and holds the files
that it has hashed (``bei.artifact.held_files``). No file is a pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bei.artifact.adapter_scales import AdapterScale
from bei.artifact.certificate.record import Certificate, Verification
from bei.artifact.certificate.reliability import CalibratedTask
from bei.artifact.held_files import FileInfo, Folder, HeldFiles
from bei.artifact.image_processor import ImageProcessor
from bei.artifact.image_sequence import ImageSequence
from bei.artifact.label_layouts import Extraction, Labelling, Listwise, OptionMarkers
from bei.artifact.sides import Role, Routes, Side
from bei.artifact.signature import ArtifactSignature
from bei.core import Limits, ScoreFunction

SCHEMA_VERSION = 10

# What stands for the weights without any adapter, where names of adapters do.
NO_ADAPTER = "none"

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKEN_WEIGHTS = "token_weights.npy"
CERTIFICATE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"
ENGINE_DIR = "engine"
IMAGE_ENGINE_DIR = "image_engine"
LABELS_DIR = "labels"
LABEL_ENGINE_DIR = f"{LABELS_DIR}/{ENGINE_DIR}"
LABEL_TOKENIZER = f"{LABELS_DIR}/{TOKENIZER}"
REFERENCE_DIR = "reference"
OPENVINO_MODEL = "model.xml"  # in engine/, target cpu
OPENVINO_WEIGHTS = "model.bin"
OPENVINO_ATTENTION = "attention.json"  # the graph's attentions, where kernels may compute them
OPENVINO_ROUNDINGS = "roundings.json"  # the graph's roundings with a range for each token, the same
TENSORRT_PLAN = "model.plan"  # in engine/, targets tensorrt and tensorrt-rtx
TENSORRT_GRAPH = "model.onnx"  # beside a plan without weights, which come from this file
CUDA_WEIGHTS = "model.safetensors"  # in engine/, targets cuda and cuda-twin: the weights of all packages


class CheckpointSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of the weights. ``sha256`` covers every checkpoint file that was read. ``transformers``: the version
    of the library that read the config, since versions interpret it differently."""

    model: str
    kind: str
    revision: str | None
    sha256: str
    transformers: str


class OutputInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An output of the engine. ``dimension``: width of a row; there is one row for each sequence, or for each token
    (``per_token``).

    ``unit_length``: rows are normalized before they are returned (late interaction; embeddings have their own setting).
    """

    name: str
    dimension: int
    per_token: bool = False
    unit_length: bool = False


class SpecSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's architecture in figures.

    ``attention``: causal or bidirectional; None for a model without layers, or with an encoder and a decoder.
    ``attention_asked``: set by the build's user, who knows the checkpoint's own code. ``adapter``: the adapter that was
    merged into the weights; "none": none of several; None: the checkpoint has none. ``adapter_scales``: of each adapter
    that is merged or computed beside the weights, by name; unset without any, and in artifacts of earlier versions."""

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
    adapter_scales: dict[str, AdapterScale] | msgspec.UnsetType = msgspec.UNSET


class Adapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (LoRA) that the engine computes beside the base model's weights.

    ``names``: in the order of their ids, from 1 on (``bei.core.Encoding``). ``tasks``: those that the checkpoint has
    for its tasks, which requests may name by task; the others are asked for by the model's name. ``is_required``: the
    checkpoint's own code does not run without one."""

    names: list[str]
    tasks: list[str]
    is_required: bool


class PlanProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of an optimization profile: minimum, optimum, maximum of each.

    ``tokens`` T of a batch, ``sequences`` B, ``longest`` S (tokens of the longest sequence), after padding by
    ``bei.engine.packing``."""

    name: str
    tokens: tuple[int, int, int]
    sequences: tuple[int, int, int]
    longest: tuple[int, int, int]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compilation of a TensorRT plan.

    ``lowerings``: the form of each attention layer (docs/engines.md, "The packed graph"), in order. ``fallbacks``:
    requested or preferred features that were unavailable, a sentence each. ``refit``: the plan holds no weights; they
    are loaded from the ONNX file beside it."""

    lowerings: list[Literal["packed", "padded", "masked", "primitive"]]
    fallbacks: list[str]
    profiles: list[PlanProfile]
    hardware_compatible: bool = False
    refit: bool = False


class Package(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compilation of an AOTInductor package.

    ``cuda``: CUDA version of the PyTorch that compiled it; None for a CPU. ``inputs``: the tensors it takes, by their
    names in ``bei.engine.packing.graph_inputs``, in order. ``kernels``: of each attention layer, in order.
    ``fallbacks``: why a layer has no faster kernel, a sentence each. ``weight_bytes``: device memory of the weights.
    ``weights``: "beside": in a file of their own; unset in artifacts of earlier versions, whose packages hold them."""

    cuda: str | None
    inputs: list[str]
    kernels: list[Literal["flash", "ragged", "plain"]]
    fallbacks: list[str]
    weight_bytes: int
    weights: Literal["beside"] | msgspec.UnsetType = msgspec.UNSET


def cuda_package(capability: str) -> str:
    """The file in engine/ with the package for ``capability`` (``SM90``), targets cuda and cuda-twin."""
    return f"model-{capability.lower()}.pt2"


class EngineRequirements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requirements of the engine on a machine. ``capabilities``: the compiler's terms (``BF16``, ``SM89``) and, for
    CPUs, ``EXACT_INT8`` (``bei.engine.cpu_features``); a CPU needs all of them, a GPU matches one. ``unit_vectors``:
    the engine normalizes embeddings itself, so their original lengths are unavailable."""

    compiler: str
    compiler_version: str
    device: str
    capabilities: list[str]
    plan: Plan | None = None
    package: Package | None = None
    unit_vectors: bool = False


class Embedding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Post-processing of the embedding output, according to the checkpoint's files.

    ``int8_largest``: the component that maps to 127 in int8 vectors (``bei.artifact.int8``), from the held-out texts;
    None if the build had no answers to them. ``layers_follow_pooling``: further layers (Dense modules) follow the
    pooling; unset in artifacts of earlier versions, so that their manifests keep their digests.
    """

    pooling: str
    normalize: bool
    similarity: str | None
    matryoshka_dimensions: list[int] | None
    int8_largest: float | None
    pools_prompt: bool = True
    layers_follow_pooling: bool | msgspec.UnsetType = msgspec.UNSET


class Tokenization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of tokenizer.json, and settings of the encoder.

    ``library`` and ``tokenizer_class`` made it from the checkpoint's files ("tokenizer.json": the file was copied).
    ``truncation_side``: the default side that is cut off. Of ``TextEncoder``: ``splits_special_tokens`` and, unset
    where they do not apply, ``filling_id``, ``refused_text`` and ``chars_per_token``."""

    library: str
    tokenizer_class: str
    truncation_side: Literal["left", "right"] = "right"
    splits_special_tokens: bool = False
    filling_id: int | msgspec.UnsetType = msgspec.UNSET
    refused_text: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    chars_per_token: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def filled_with(self) -> int | None:
        """The token that texts are filled up with; None: they are not."""
        return None if self.filling_id is msgspec.UNSET else self.filling_id


class Classification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The meaning of the columns of ``logits`` or ``token_logits``; ``function`` turns them into scores."""

    labels: list[str]
    function: ScoreFunction

    @property
    def relevance(self) -> ScoreFunction:
        """The function for a reranker's scores: ``function``, or the sigmoid if that gives no score for one logit."""
        return "sigmoid" if self.function in ("none", "softmax") else self.function


class RerankTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text in which a language model reads a pair: ``prefix``, ``body`` and ``suffix`` are tokenized separately.

    The body has the slots {query}, {document} and {instruction}; only its tokens are truncated. ``last_id``: a token
    behind the suffix, which no text has.
    """

    prefix: str
    body: str
    suffix: str
    instruction: str
    last_id: int | msgspec.UnsetType = msgspec.UNSET


class ClassifyTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text in which a language model reads what it classifies: ``prefix``, ``body`` and ``suffix`` are tokenized
    separately.

    The body has the slot {text}; with {response}, inputs are pairs, of which it is the second text. Only its tokens are
    truncated.
    """

    prefix: str
    body: str
    suffix: str

    @property
    def reads_pairs(self) -> bool:
        return "{response}" in self.body


class DecideTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a language model reads to decide. ``body`` has the slots {text}, {question} and {options}.

    ``option``, with the slot {option}, follows it, tokenized by itself, and options are told apart by its likelihood;
    unset where they are by the scores of tokens behind the body. No token stands around either.
    """

    body: str
    option: str | msgspec.UnsetType = msgspec.UNSET


class ImageTower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image side of a model: an engine for images of ``image_size`` (height and width) in patches of
    ``patch_size`` pixels, with a ``class_token`` before them or not, and so many ``registers`` behind that (unset: 0).
    ``max_seq_len``: the tokens of an image. Where images have many sizes (``processor.most_patches``), these are the
    size of the canary and the most tokens. Of a model with two towers vectors are comparable with those of texts. Of a
    model that reads images alone, ``spec``, ``engine`` and the limits are the manifest's own. ``sequence``: the
    manifest's engine reads the tower's states among tokens; unset where an image has its vector from the tower.
    """

    processor: ImageProcessor
    image_size: tuple[int, int]
    patch_size: int
    class_token: bool
    pooling: str
    spec: SpecSummary
    engine: EngineRequirements
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    registers: int | msgspec.UnsetType = msgspec.UNSET
    sequence: ImageSequence | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_leading(self) -> int:
        """Tokens before the patches."""
        return self.class_token + (self.registers or 0)

    @property
    def image_bytes(self) -> int:
        """Bytes of ``bei.core.ImagePatches.levels`` of an image, at most: float32 with ``fractions``, else uint8."""
        return self.max_seq_len * 3 * self.patch_size**2 * (4 if self.processor.fractions else 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of an image, at most, where the model's vectors come from."""
        return self.sequence.num_tokens(self.max_seq_len) if self.sequence else self.max_seq_len

    def num_pixels(self, num_tokens: int) -> int:
        """Pixels of an image with so many tokens; 0 of one that has none, as it could not be read."""
        around, side = (self.sequence.num_tokens(0), self.sequence.side) if self.sequence else (0, 1)
        return max(0, num_tokens - around - self.num_leading) * (side * self.patch_size) ** 2


class LabelTower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The encoder of labels, of a model that reads them apart from texts: an engine of its own, with its tokenizer.
    ``embedding``: how a label's vector is pooled."""

    spec: SpecSummary
    outputs: list[OutputInfo]
    embedding: Embedding
    tokenization: Tokenization
    engine: EngineRequirements
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All facts of an artifact. ``tokenization``: None if the model reads images alone. ``verification``: the
    certificate's kind. ``images`` and ``labels``: unset in artifacts of models without such a tower, so that their
    manifests keep their digests; so is ``temperatures``, unless ``bei calibrate`` has written it."""

    schema_version: int
    bei_version: str
    name: str
    source: CheckpointSource
    tasks: list[str]
    spec: SpecSummary
    outputs: list[OutputInfo]
    embedding: Embedding | None
    classification: Classification | None
    rerank_template: RerankTemplate | None
    tokenization: Tokenization | None
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
    adapters: Adapters | msgspec.UnsetType = msgspec.UNSET
    images: ImageTower | msgspec.UnsetType = msgspec.UNSET
    labels: LabelTower | msgspec.UnsetType = msgspec.UNSET
    extraction: Extraction | msgspec.UnsetType = msgspec.UNSET
    listwise: Listwise | msgspec.UnsetType = msgspec.UNSET
    classify_template: ClassifyTemplate | msgspec.UnsetType = msgspec.UNSET
    decide_template: DecideTemplate | msgspec.UnsetType = msgspec.UNSET
    labelling: Labelling | msgspec.UnsetType = msgspec.UNSET
    option_markers: OptionMarkers | msgspec.UnsetType = msgspec.UNSET
    temperatures: dict[CalibratedTask, float] | msgspec.UnsetType = msgspec.UNSET
    digest: str = ""

    def temperature(self, task: CalibratedTask) -> float:
        """What logits are divided by before the softmax of ``task``: 1 unless ``bei calibrate`` has fitted it."""
        return (self.temperatures or {}).get(task, 1.0)

    @property
    def image_tower(self) -> ImageTower | None:
        """Its image side; None: it reads texts only."""
        return self.images or None

    @property
    def label_tower(self) -> LabelTower | None:
        """Its encoder of labels; None: it reads none, or with the text."""
        return self.labels or None

    @property
    def reads_texts(self) -> bool:
        """False if it reads images alone."""
        return self.tokenization is not None

    @property
    def modalities(self) -> Sequence[Literal["text", "image"]]:
        """What it reads."""
        if not self.images:
            return ["text"]
        return ["text", "image"] if self.reads_texts else ["image"]

    @property
    def reads_images_by_token(self) -> bool:
        """True if an image has a vector for each token of a decoder's sequence, and none of its own."""
        tower = self.image_tower
        return bool(tower and tower.sequence) and "embed_tokens" in self.tasks

    @property
    def second_tower(self) -> ImageTower | LabelTower | None:
        """The tower beside that of texts, which has an engine of its own; None: the model has one engine."""
        return (self.image_tower if self.reads_texts else None) or self.label_tower

    @property
    def of_images(self) -> Manifest:
        """The manifest of the engine that reads images, by itself."""
        return self.of_second if self.reads_texts else self

    @property
    def of_second(self) -> Manifest:
        """The manifest of the second tower's engine, by itself."""
        tower = self.second_tower
        assert tower is not None, "the caller has asked"
        own = [info for info in self.outputs if info.name == "embedding"]
        if isinstance(tower, ImageTower) and tower.sequence:
            own = [OutputInfo(name="image_features", dimension=tower.sequence.row_width, per_token=True)]
        return msgspec.structs.replace(
            self,
            spec=tower.spec,
            outputs=tower.outputs if isinstance(tower, LabelTower) else own,
            embedding=tower.embedding if isinstance(tower, LabelTower) else self.embedding,
            engine=tower.engine,
            max_num_tokens=tower.max_num_tokens,
            max_batch_size=tower.max_batch_size,
            max_seq_len=tower.max_seq_len,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.max_num_tokens, self.max_batch_size, self.max_seq_len)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters, in the order of their ids, from 1 on."""
        return () if self.adapters is msgspec.UNSET else tuple(self.adapters.names)

    def dimension(self, output: str) -> int | None:
        """Width of ``output``; None: the model has no such output."""
        for info in self.outputs:  # called several times a request: a generator is measurably slower
            if info.name == output:
                return info.dimension
        return None


class Artifact(msgspec.Struct, frozen=True, eq=False):
    """A verified artifact on disk. ``signed``: its signature, if it has one. Equal ones need not hold the same files.

    ``files``: the files that were hashed, but for those of the certificate. None: it was just built, or another process
    holds them; then ``file`` and ``engine_files`` refer to whatever lies at ``path``. ``folder``: of its engine.
    """

    path: Path
    manifest: Manifest
    certificate: Certificate
    signed: ArtifactSignature | None = None
    files: HeldFiles | None = None
    folder: str = ENGINE_DIR

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Artifact):
            return NotImplemented
        mine, theirs = ((one.path, one.manifest, one.certificate, one.signed) for one in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]  # its parts have none

    @property
    def engine_dir(self) -> Path:
        """The folder of the target's own files."""
        return self.path / self.folder

    @property
    def engine_files(self) -> Folder:
        """The target's own files, as they were verified."""
        return self.engine_dir if self.files is None else self.files.below(self.folder)

    @property
    def of_second(self) -> Artifact:
        """The second tower as an artifact of its own: its engine, and a manifest that describes it alone."""
        folder = IMAGE_ENGINE_DIR if self.manifest.image_tower else LABEL_ENGINE_DIR
        return msgspec.structs.replace(self, manifest=self.manifest.of_second, folder=folder)

    def file(self, name: str) -> Path:
        """A path that opens the file ``name`` as it was verified. Raises ArtifactFileMissingError."""
        return self.path / name if self.files is None else self.files.path(name)

    def without_files(self) -> Artifact:
        """The same, to be sent to another process, or to be kept when everything was read."""
        return msgspec.structs.replace(self, files=None)

    def check_files(self) -> None:
        """Raise ArtifactHashMismatchError if a held file was written over since it was verified."""
        if self.files is not None:
            self.files.check()

    def has_file(self, name: str) -> bool:
        return any(info.path == name for info in self.manifest.files)
