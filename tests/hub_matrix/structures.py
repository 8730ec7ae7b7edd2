"""An entry of the list: a real repository, and its structure made small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import transformers
from tokenizers import Tokenizer

from bei.core import Encoding, Float32Array
from tests.hub_matrix.sources import OF_CLASSES, SOURCES
from tests.hub_matrix.tokenizers import CLASSES
from tests.support.checkpoints import MAX_TOKENS, Dense, Normalize, wordpiece_tokenizer

Settings: TypeAlias = dict[str, Any]
Task = Literal["embed", "embed_sparse", "embed_tokens", "rerank", "classify", "classify_tokens", "extract", "decide"]
# From a checkpoint's folder to the last layer's states of a text.
StatesOf: TypeAlias = Callable[[Path], Callable[[Encoding], torch.Tensor]]

# From a checkpoint's folder and the files of images to their vectors, of each image or of its tokens.
ImagesOf: TypeAlias = Callable[[Path, list[bytes]], Sequence[Float32Array] | Float32Array]

# From a checkpoint's folder to the scores of a query's documents.
RanksOf: TypeAlias = Callable[[Path], Callable[[str, list[str]], Float32Array]]

# From a checkpoint's folder to the probabilities of a question's options for a text.
DecidesOf: TypeAlias = Callable[[Path], Callable[[str, Mapping[str, Any]], list[float]]]

# From a checkpoint's folder to the scores of a text's spans for labels, by first word, width and label, or of pairs.
SpansOf: TypeAlias = Callable[[Path], Callable[[str, Sequence[str]], Float32Array]]


@dataclass(frozen=True)
class LayerNorm:
    """A module of sentence-transformers behind the pooling."""

    dimension: int


@dataclass(frozen=True)
class Template:
    """The text around what a language model reads, and the tokens that it is scored by: (yes,), (no, yes) or more.

    ``chat``: the parts are empty and the checkpoint's chat template makes the text.
    """

    prefix: str = ""
    body: str = ""
    suffix: str = ""
    tokens: tuple[str, ...] = ("no", "yes")
    chat: bool = False


@dataclass(frozen=True)
class Late:
    """Late interaction: the markers of the two sides, their lengths, and the token that fills up queries; ``attended``:
    other tokens see it."""

    width: int
    query: str = "[Q] "
    document: str = "[D] "
    query_length: int = 32
    document_length: int = 300
    mask: str = "<mask>"
    expansion: bool = True
    attended: bool = False


# What rerankers of images are asked.
IMAGE_QUERY = "what is in the picture?"

# What models that decide are asked, in the form of /v1/systemone.
QUESTIONS: Mapping[str, Mapping[str, Any]] = {
    "which": {
        "type": "choice",
        "instructions": "What is it?",
        "criteria": {"a cat": None, "a mat": "of hair", "b": None},
    },
    "how": {"type": "score", "instructions": "How long is it?", "criteria": ["short", "long"]},
    "is": {"type": "noul", "instructions": "It is a cat."},
}

# What models that extract are to find.
LABELS = ("cat", "a greeting", "b")


@dataclass(frozen=True)
class Structure:
    """A repository's structure: the files to write, and what its own code computes of them.

    ``hf_class`` with ``settings`` makes the weights and answers; None: ``prepare`` writes everything, and ``states``
    answers, or nobody does (such a repository must be refused). ``tokenizer_class``: that of tokenizer_config.json,
    where it is not the one of ``tokenizers.CLASSES``. ``changes`` are keys of config.json that the class
    does not write, None removes one. ``files`` are JSON files beside the weights; ``prepare`` runs last.

    ``pooling`` and ``tail`` make a vector of the states; ``modules``: they are in sentence-transformers' files, else
    ``options`` say them. ``prompts`` are those of config_sentence_transformers.json; the first is put before texts.
    ``labels`` and ``function``: a classifier's. ``pairs``: it reads two texts. ``options``: what a user must say.
    ``last_token`` is put behind every text because tokenizer_config.json asks for it. ``unmasked``: all tokens of this
    decoder see each other. ``types``: the tokenizer's class gives token types. ``linear_files``: BGE-M3's two layers.
    ``behind``: what remote code computes of the states, other states or a score.
    ``static``: means of a table's rows, of tokens in no vocabulary too or not, or with a tanh behind (SSE).
    ``rounded``: vectors are pplx-embed's before it rounds them: a tanh. ``ranks``: scores of a query's
    documents by remote code, which reads them together. ``images``: vectors of images by the class, which are
    compared in place of texts'. ``decides``: probabilities of a question's options for a text, choices sorted.
    ``spans``: scores of all spans of a text for labels. ``relations``: those of all pairs of its first words.
    """

    task: Task
    hf_class: str | None = None
    settings: Settings = field(default_factory=dict)
    tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer
    tokenizer_class: str = ""
    changes: Settings = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    prepare: tuple[Callable[[Path], object], ...] = ()
    states: StatesOf | None = None
    pooling: str = "mean"
    tail: tuple[Dense | LayerNorm | Normalize, ...] = ()
    modules: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    labels: int = 0
    function: Literal["sigmoid", "softmax", "none"] = "softmax"
    pairs: bool = False
    template: Template | None = None
    late: Late | None = None
    linear_files: bool = False
    options: Settings = field(default_factory=dict)
    max_tokens: int = MAX_TOKENS
    last_token: str | None = None
    unmasked: bool = False
    types: bool = True
    stored: torch.dtype = torch.float32
    behind: Callable[[Path, torch.Tensor], torch.Tensor] | None = None
    static: Literal["", "with unknown", "without unknown", "stable"] = ""
    rounded: bool = False
    ranks: RanksOf | None = None
    images: ImagesOf | None = None
    decides: DecidesOf | None = None
    spans: SpansOf | None = None
    relations: SpansOf | None = None

    @property
    def named_tokenizer_class(self) -> str:
        """The class in tokenizer_config.json; "" if there is none, and transformers goes by the model's type."""
        usual = (name for start, name in CLASSES.items() if (self.hf_class or "").startswith(start))
        return self.tokenizer_class or next(usual, "")

    @property
    def architecture(self) -> str:
        """The name in config.json; "" if there is none."""
        named = {"architectures": [self.hf_class or ""], **self._config, **self.changes}.get("architectures")
        return str((named or [""])[0])

    @property
    def model_type(self) -> str:
        """The name in config.json; "" if there is none."""
        own = getattr(transformers, self.hf_class).config_class.model_type if self.hf_class else ""
        return str({"model_type": own, **self._config, **self.changes}.get("model_type") or "")

    @property
    def _config(self) -> Settings:
        """The config.json of a repository without a class."""
        config: Settings = self.files.get("config.json", {})
        return config

    @property
    def can_be_compared(self) -> bool:
        """True if there is a reference to compare with."""
        own = self.states or self.static or self.ranks or self.images or self.decides
        return bool(self.hf_class or own or self.spans or self.relations)


@dataclass(frozen=True)
class Entry:
    """A repository. ``special`` is what sets its structure apart; ``same_as`` are others of the same structure.

    ``unsure``: what about it is from memory, or a guess, though a source was read.
    """

    repository: str
    structure: Structure
    special: str = ""
    same_as: tuple[str, ...] = ()
    unsure: str = ""

    @property
    def repositories(self) -> tuple[str, ...]:
        """All names of this row."""
        return (self.repository, *self.same_as)

    @property
    def sources(self) -> tuple[str, ...]:
        """References that were read; none: the facts are from memory."""
        return SOURCES.get(self.repository) or OF_CLASSES.get(self.repository, ())
