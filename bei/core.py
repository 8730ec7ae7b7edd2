"""The nouns that cross module borders. No behaviour beyond small properties.

What is made for every input is a tuple: C fills it, where a frozen dataclass makes a call for each of its fields.

Shapes use T (tokens of a batch), B (sequences of a batch), E (width of an embedding).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
# Of an image's pixels, 0 to 255.
Levels: TypeAlias = npt.NDArray[np.uint8 | np.float32]

# What an engine answers: output name -> float32 array, row i for sequence i ("embedding" is [B, E]) or, for outputs
# per token, row t for packed token t ("token_embedding" is [T, D]).
Outputs: TypeAlias = Mapping[str, Float32Array]

# What makes scores of logits: probabilities, what a cross-encoder was trained with, or nothing.
ScoreFunction: TypeAlias = Literal["sigmoid", "softmax", "tanh", "relu", "softplus", "none"]

# One sequence's part of it: output name -> [width], or [tokens, width] of outputs per token.
Row: TypeAlias = Mapping[str, Float32Array]

# Numbers of a row beside those of a label's pairs of boundaries (``bei.engine.boundaries``).
EXTRAS = 4


def record_columns(width: int, num_queries: int) -> tuple[int, int]:
    """Numbers of a boundary as a start, or as an end, and of a whole row (``bei.engine.record_columns``)."""
    of_candidate = 3 * width + 2 * num_queries + 4
    return of_candidate, 2 * of_candidate + width + 2 * num_queries + 1


@dataclass(frozen=True)
class TokenSpans:
    """The places of the n tokens of an encoding in its text.

    ``offsets`` int32 [n, 2], first and one past the last character; ``words`` int32 [n], equal for neighbours that are
    one word, -1 of special tokens; ``special`` bool [n].
    """

    offsets: Int32Array
    words: Int32Array
    special: npt.NDArray[np.bool_]

    @classmethod
    def of_special_tokens(cls, num_tokens: int) -> TokenSpans:
        """Spans of tokens that stand for no part of the text."""
        nowhere = np.zeros((num_tokens, 2), np.int32)
        return cls(nowhere, np.full(num_tokens, -1, np.int32), np.ones(num_tokens, np.bool_))

    @classmethod
    def concatenated(cls, parts: Seq[TokenSpans]) -> TokenSpans:
        return cls(
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.special for part in parts]),
        )


@dataclass(frozen=True)
class Expansion:
    """Tokens ``token_id`` behind an input until it has ``num_tokens`` (ColBERT, arXiv:2004.12832, section 3.2).

    ``attended``: other tokens may attend to the expansion tokens. Expansion tokens always attend to the real ones.
    ``padding_id``: tokens of the input itself with this id become ``token_id`` too, and are attended.
    """

    token_id: int
    num_tokens: int
    attended: bool
    padding_id: int | None = None


class ImagePatches(NamedTuple):
    """An image as its tower reads it: ``levels`` [tokens, 3 * patch_size**2], one row a token, zeros for tokens before
    the patches. In a row pixels follow each other from left to right and top to bottom, each with red, green, blue.
    ``grid``: rows and columns of patches. ``digest`` of both."""

    levels: Levels
    digest: bytes
    grid: tuple[int, int]


class PlacedImage(NamedTuple):
    """An image among the tokens that a decoder reads. ``places`` int32 [states]: of each of the tower's states the
    token that it stands for, which follow each other. Each is of as many ``patches``, those of a square block."""

    patches: ImagePatches
    places: Int32Array

    def with_states(self, rows: Float32Array) -> ImageFeatures:
        """``rows`` of the tower, one a patch."""
        side = isqrt(len(self.patches.levels) // len(self.places))
        states = rows.reshape(len(rows) // side**2, side**2 * rows.shape[1])
        rows_of_tokens, columns = self.patches.grid
        return ImageFeatures(states, self.patches.digest, self.places, (rows_of_tokens // side, columns // side))


class ImageFeatures(NamedTuple):
    """An image as a decoder reads it among tokens: ``rows`` float32 [n, width], of the image tower, in the place of
    the rows of the tokens at ``places`` int32 [n], which follow each other. They stand in so many rows and columns,
    ``grid``. ``digest`` of the image."""

    rows: Float32Array
    digest: bytes
    places: Int32Array
    grid: tuple[int, int]


class LabelVectors(NamedTuple):
    """Labels of a request as an engine reads them beside a text: ``rows`` float32 [labels, width], of the tower of
    labels; or a text's entities (``bei.engine.entity_pairs``). ``digest`` of them."""

    rows: Float32Array
    digest: bytes


class Encoding(NamedTuple):
    """One tokenized input. ``truncated``: tokens were cut off to fit ``max_seq_len``. ``spans`` where asked for.

    Only the first ``num_keys`` tokens serve as attention keys; None: all of them. The first ``num_unpooled`` tokens (of
    a prompt) are left out of the mean, by engines that support it. ``adapter``: the one that reads it, from 1 on in the
    order of the manifest's; 0: the base model's weights alone. ``image``: the input is an image for its tower, whose
    tokens all have id 0. ``images``: those that a decoder reads among the tokens, in order; ``features``: the same for
    the decoder's engine, with the tower's states. ``label_vectors``: what a text is scored for, by engines that read
    labels so. ``is_label``: the input is a label, for the tower of labels.
    """

    input_ids: Int32Array
    token_type_ids: Int32Array | None = None
    truncated: bool = False
    spans: TokenSpans | None = None
    num_keys: int | None = None
    num_unpooled: int = 0
    adapter: int = 0
    image: ImagePatches | None = None
    label_vectors: LabelVectors | None = None
    is_label: bool = False
    images: tuple[PlacedImage, ...] = ()
    features: tuple[ImageFeatures, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the engine will see, special tokens included."""
        return len(self.input_ids)

    @property
    def has_ids_only(self) -> bool:
        """True if nothing but the token ids matters to an engine, as of most texts."""
        return self.token_type_ids is None and self[4:] == _NOTHING_BESIDE_IDS

    @property
    def is_for_second(self) -> bool:
        """True for what the second tower reads of a model that has two: an image or a label, not a text."""
        return self.image is not None or self.is_label

    @property
    def of_tower(self) -> list[Encoding]:
        """``images``, each as its tower reads it."""
        return [Encoding(np.zeros(len(one.patches.levels), np.int32), image=one.patches) for one in self.images]

    @property
    def levels(self) -> list[Levels]:
        """The levels of its images."""
        own = [] if self.image is None else [self.image.levels]
        return own + [one.patches.levels for one in self.images]

    @property
    def without_pixels(self) -> Encoding:
        """The tokens, of which a call's answer is made."""
        return self._replace(image=None, images=())

    @property
    def image_digests(self) -> bytes:
        """The digests of the images among the tokens, one behind the other."""
        return b"".join([one.patches.digest for one in self.images] + [one.digest for one in self.features])

    def with_features(self, rows: Seq[Float32Array]) -> Encoding:
        """The input as a decoder reads it, with the tower's ``rows`` of each image, one a token of the tower; or with
        none, to ask whether its answer is known."""
        features = [image.with_states(own) for image, own in zip(self.images, rows, strict=True)]
        return self._replace(images=(), features=(*features,))


# Of an Encoding, from ``num_keys`` on.
_NOTHING_BESIDE_IDS: tuple[object, ...] = tuple(Encoding._field_defaults.values())[3:]


def expanded(encoding: Encoding, expansion: Expansion) -> Encoding:
    """``encoding`` with the expansion tokens. One without tokens stays as it is."""
    if expansion.padding_id is not None:
        ids = encoding.input_ids
        encoding = encoding._replace(input_ids=np.where(ids == expansion.padding_id, expansion.token_id, ids))
    missing = expansion.num_tokens - encoding.num_tokens
    if missing <= 0 or not encoding.num_tokens:
        return encoding
    types, spans = encoding.token_type_ids, encoding.spans
    return encoding._replace(
        input_ids=np.append(encoding.input_ids, np.full(missing, expansion.token_id, np.int32)),
        token_type_ids=None if types is None else np.append(types, np.zeros(missing, np.int32)),
        spans=None if spans is None else TokenSpans.concatenated([spans, TokenSpans.of_special_tokens(missing)]),
        num_keys=None if expansion.attended else encoding.num_tokens,
    )


class SharedTokens(NamedTuple):
    """Which of the T tokens of a batch are computed, where sequences begin alike and see only what is before them.

    ``kept`` int32 [C]: their places in the batch, C <= T. ``places`` int32 [T]: for each token of the batch, its place
    among those. Along a sequence the places ascend.
    """

    kept: Int32Array
    places: Int32Array


class LabelTable(NamedTuple):
    """The ``label_vectors`` of a batch: ``rows`` float32 [R, width]; sequence i is scored for ``counts[i]`` of them
    from ``starts[i]`` on, both int32 [B]. Sequences with the same labels share their rows."""

    rows: Float32Array
    starts: Int32Array
    counts: Int32Array

    @classmethod
    def of(cls, encodings: Seq[Encoding]) -> LabelTable | None:
        """None where no encoding has labels; among others one without has a row of zeros."""
        given = [encoding.label_vectors for encoding in encodings]
        width = next((one.rows.shape[1] for one in given if one is not None), 0)
        if not width:
            return None
        nothing = LabelVectors(np.zeros((1, width), np.float32), b"")
        tables = {one.digest: one.rows for one in (one or nothing for one in given)}
        starts = dict(zip(tables, accumulate((len(rows) for rows in tables.values()), initial=0), strict=False))
        keys = [(one or nothing).digest for one in given]
        return cls(
            np.concatenate([*tables.values()]),
            np.array([starts[key] for key in keys], np.int32),
            np.array([len(tables[key]) for key in keys], np.int32),
        )

    def part(self, first: int, end: int) -> LabelTable:
        """The table of the sequences ``first`` to ``end`` - 1."""
        return self._replace(starts=self.starts[first:end], counts=self.counts[first:end])


class FeatureTable(NamedTuple):
    """The ``features`` of a batch of T tokens: ``rows`` float32 [R, width]; ``slots`` int32 [T]: of each token one more
    than the row that stands for it, 0: its id does. Equal images share their rows. ``spans`` int32 [images, 3]: of each
    its first token, and its rows and columns of tokens, which follow each other."""

    rows: Float32Array
    slots: Int32Array
    spans: Int32Array

    @classmethod
    def of(cls, encodings: Seq[Encoding]) -> FeatureTable | None:
        """None where no encoding has features."""
        tables: dict[bytes, ImageFeatures] = {}
        slots = np.zeros(sum(encoding.num_tokens for encoding in encodings), np.int32)
        firsts: dict[bytes, int] = {}
        spans: list[tuple[int, int, int]] = []
        start, num_rows = 0, 0
        for encoding in encodings:
            for own in encoding.features:
                if own.digest not in tables:
                    tables[own.digest], firsts[own.digest] = own, num_rows
                    num_rows += len(own.rows)
                first = firsts[own.digest] + 1
                slots[start + own.places] = np.arange(first, first + len(own.places), dtype=np.int32)
                spans.append((start + int(own.places[0]), *own.grid))
            start += encoding.num_tokens
        if not tables:
            return None
        return cls(np.concatenate([one.rows for one in tables.values()]), slots, np.array(spans, np.int32))

    def part(self, tokens: slice) -> FeatureTable:
        """The table of the sequences of ``tokens``."""
        firsts = self.spans[:, 0]
        own = self.spans[(firsts >= tokens.start) & (firsts < tokens.stop)] - np.array([tokens.start, 0, 0], np.int32)
        return self._replace(slots=self.slots[tokens], spans=own)


class PackedBatch(NamedTuple):
    """Sequences laid end to end without padding: what an engine runs once.

    ``input_ids`` is int32 [T]; ``cu_seqlens`` int32 [B+1], starts at 0, strictly increasing, ends at T.
    ``token_type_ids`` is int32 [T], or None where every token is of type 0. ``key_lens`` is int32 [B]: only the
    first so many tokens of each sequence serve as attention keys; None: all of them. ``unpooled_lens`` is int32 [B]:
    the first so many tokens of each are left out of means; None: no token is. ``adapters`` is int32 [B]: the adapter
    that reads each sequence, 0: none; None: none reads any. ``levels`` is [T, width], the pixels of images
    (``ImagePatches``), ``grids`` int32 [B, 2] their rows and columns; None: sequences are texts. ``digests``: one a
    sequence, where token ids do not tell images apart. ``features``: the images that a decoder reads; None: it reads
    none. ``shared``: tokens to compute once, for engines that can
    (``EngineInfo.shares_prefixes``); answers are the same without it. ``labels``: what the sequences are scored for;
    None: engines that read labels have one of zeros.
    """

    input_ids: Int32Array
    cu_seqlens: Int32Array
    token_type_ids: Int32Array | None = None
    key_lens: Int32Array | None = None
    unpooled_lens: Int32Array | None = None
    adapters: Int32Array | None = None
    levels: Levels | None = None
    shared: SharedTokens | None = None
    digests: list[bytes] | None = None
    labels: LabelTable | None = None
    grids: Int32Array | None = None
    features: FeatureTable | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cu_seqlens[-1])

    @property
    def num_computed(self) -> int:
        """Tokens that are computed: T, or fewer where some are shared."""
        return self.num_tokens if self.shared is None else len(self.shared.kept)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @classmethod
    def from_encodings(cls, encodings: Seq[Encoding]) -> PackedBatch:
        """Lay ``encodings`` end to end. Token types are 0 where an encoding has none."""
        arrays = [encoding.input_ids for encoding in encodings]
        cu_seqlens = np.array([0, *accumulate(map(len, arrays))], np.int32)
        input_ids = np.concatenate(arrays, dtype=np.int32)
        if all([encoding.has_ids_only for encoding in encodings]):
            return cls(input_ids, cu_seqlens)
        images = [encoding.image for encoding in encodings if encoding.image is not None]
        if images:
            if len(images) < len(encodings):
                raise ValueError("a batch holds texts or images, not both: they have engines of their own")
            levels = np.concatenate([image.levels for image in images])
            grids = np.array([image.grid for image in images], np.int32)
            return cls(input_ids, cu_seqlens, levels=levels, digests=[image.digest for image in images], grids=grids)
        key_lens = None
        if any([encoding.num_keys is not None for encoding in encodings]):
            key_lens = np.array([e.num_tokens if e.num_keys is None else e.num_keys for e in encodings], np.int32)
        unpooled_lens = None
        if any([encoding.num_unpooled for encoding in encodings]):
            unpooled_lens = np.array([encoding.num_unpooled for encoding in encodings], np.int32)
        adapters = None
        if any([encoding.adapter for encoding in encodings]):
            adapters = np.array([encoding.adapter for encoding in encodings], np.int32)
        features: FeatureTable | None = None
        digests: list[bytes] | None = None
        if any([encoding.features for encoding in encodings]):
            features = FeatureTable.of(encodings)
            digests = [encoding.input_ids.tobytes() + encoding.image_digests for encoding in encodings]
        labels = None
        if any([encoding.label_vectors is not None for encoding in encodings]):
            labels = LabelTable.of(encodings)
        token_type_ids = None
        if any([encoding.token_type_ids is not None for encoding in encodings]):
            token_type_ids = np.zeros(len(input_ids), np.int32)
            for encoding, start, end in zip(encodings, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
                if encoding.token_type_ids is not None:
                    token_type_ids[start:end] = encoding.token_type_ids
        return cls(
            input_ids,
            cu_seqlens,
            token_type_ids,
            key_lens,
            unpooled_lens,
            adapters,
            digests=digests,
            labels=labels,
            features=features,
        )


def rows_of_sequences(rows: Float32Array, batch: PackedBatch, *, per_token: bool) -> list[Float32Array]:
    """One output of ``batch``, cut into the part of each sequence: [width] or, ``per_token``, [tokens, width]."""
    return np.split(rows, batch.cu_seqlens[1:-1]) if per_token else list(rows)


def finite_sequences(outputs: Outputs, batch: PackedBatch, per_token: Set[str]) -> npt.NDArray[np.bool_]:
    """Which sequences have no NaN or Inf in any output, [B]."""
    finite = np.ones(batch.batch_size, np.bool_)
    for name, rows in outputs.items():
        is_finite = np.isfinite(rows)
        if not np.logical_and.reduce(is_finite, axis=None):  # hardly ever
            by_row = np.logical_and.reduce(is_finite, axis=1)
            finite &= np.logical_and.reduceat(by_row, batch.cu_seqlens[:-1]) if name in per_token else by_row
    return finite


@dataclass(frozen=True)
class Limits:
    """Limits of one batch. Tokens are real tokens, not padded ones."""

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int

    def __post_init__(self) -> None:
        if min(self.max_num_tokens, self.max_batch_size, self.max_seq_len) < 1:
            raise ValueError(f"limits must be positive: {self}")
        if self.max_num_tokens < self.max_seq_len:
            raise ValueError(f"max_num_tokens {self.max_num_tokens} cannot hold max_seq_len {self.max_seq_len}")


@dataclass(frozen=True)
class EngineInfo:
    """Facts an engine states about itself.

    ``outputs`` maps names to widths, those in ``per_token`` have a row a token. ``num_streams``: how many threads may
    call ``run`` at the same time. Each call has buffers of its own, so on a device that computes beside the host a
    second stream prepares its inputs while the first one's step runs. ``token_buckets``: the sizes that a step's tokens
    are filled up to, ascending; empty where any size runs as it is, or nearly so. ``memory_bytes``: what the engine
    holds of the device's own memory; None where it computes in the process's. ``is_replaceable``: another engine can
    be loaded in this process while a step of this one does not end. ``unshared``: why it computes what sequences begin
    with in common for each of them, for people; None: it computes the ``shared`` tokens of a batch once.
    """

    target: str
    precision: str
    device: str
    limits: Limits
    outputs: Mapping[str, int]
    per_token: frozenset[str] = frozenset()
    num_streams: int = 1
    token_buckets: tuple[int, ...] = ()
    memory_bytes: int | None = None
    is_replaceable: bool = True
    unshared: str | None = "this engine computes every text whole"

    @property
    def shares_prefixes(self) -> bool:
        """True if it computes the ``shared`` tokens of a batch once."""
        return self.unshared is None

    @property
    def uses_cores(self) -> bool:
        """True if it computes on the host's cores."""
        return self.target == "cpu"


class Engine(Protocol):
    """The live object that runs packed batches. Text, HTTP, queues and deadlines are never inside."""

    @property
    def info(self) -> EngineInfo:
        """The facts; constant for the engine's life."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Compute the outputs called ``outputs`` (None: all), float32, a row a sequence or a token.

        Only what was asked for is copied, and the arrays are the caller's to keep. At most ``info.num_streams`` calls
        at the same time. Raises EngineError.
        """

    def warmup(self) -> None:
        """Run the largest shapes once, so that the first request meets allocated memory."""

    def close(self) -> None:
        """Free the device. The engine cannot be used afterwards."""
