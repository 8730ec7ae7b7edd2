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

from pathlib import Path
from typing import Literal

import msgspec

from bei.artifact.certificate.record import (
    Certificate,
    Verification,
)
from bei.artifact.sides import Role, Routes, Side
from bei.artifact.signature import ArtifactSignature
from bei.core import Limits, ScoreFunction

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


class CheckpointSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    source: CheckpointSource
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
    signed: ArtifactSignature | None = None

    @property
    def engine_dir(self) -> Path:
        """Folder of the target's own files."""
        return self.path / ENGINE_DIR
