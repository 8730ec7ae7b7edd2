"""Packed batches to the input tensors of a compiled graph: positions, pad, unpad and pool indices.

All engines share this function, so that they agree. Independent of models and compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple, cast

import numpy as np

from bei.core import Float32Array, Int32Array, PackedBatch, SharedTokens
from bei.engine import (
    boundaries,
    entity_pairs,
    grid_positions,
    grid_windows,
    image_positions,
    schema_columns,
    scored,
    span_pairs,
    words,
)

# Sixteen buckets an octave: filler is at most 1/16 of a dimension, and an engine meets few distinct shapes. CPU engines
# keep memory for each shape (docs/decisions.md, "Memory grew with traffic").
_BUCKETS_PER_OCTAVE_LOG2 = 4
_MIN_STEP = 8
_KEYS = {"key_lens", "key_mask", "token_key_lens"}
_CUMULATIVE = {"cu_query_lens", "cu_key_lens"}
# What packed attention reads where it takes shared tokens: of how many, and which, each sequence's keys begin with.
SHARED_KEYS = ("cu_shared_lens", "shared_rows")
# The input of TensorRT's packed attention, which wants every token to be a sequence's.
_ALL_OWNED = "cu_key_lens"
_POSITIONS_BUT = "position_ids_but_"
_PIXEL_LEVELS = "pixel_levels_"
_LABEL_VECTORS = "label_vectors_"
_IMAGE_FEATURES = "image_features_"
FEATURE_SLOTS = "feature_slots"
# Inputs that can be made where sequences share tokens: a row for each token, which is the same in all of them; places
# of tokens; and what belongs to sequences and slots.
_OF_SHARED_TOKENS = {"input_ids", "token_type_ids", "position_ids", "unpad_index"}
_PLACES = {"pad_index", "first_index", "last_index"}
_OF_SEQUENCES = {"slot_mask", "slot_ids", "seq_lens", "pool_mask", "key_lens", "key_mask"}
# Inputs that are in the way of that, and what they say of a model or an engine.
_NOT_SHARED = {
    "cu_query_lens": "its attention reads tokens by the starts of texts (bei-kernels-cpu before 0.5.0, FlashAttention)",
    "token_adapters": "each text reads its adapter",
    "token_seq_lens": "its tokens turn by the length of their text (LongRoPE)",
    _POSITIONS_BUT: "its positions pass over a token",
    FEATURE_SLOTS: "its tokens may stand for images, and equal ids then do not mean equal states",
}


def bucket(size: int, min_step: int = _MIN_STEP) -> int:
    """``size`` rounded up to a bucket: a multiple of a power of two that grows with ``size``."""
    step = max(min_step, 1 << max(0, size.bit_length() - 1 - _BUCKETS_PER_OCTAVE_LOG2))
    return -(-size // step) * step


def _fine_bucket(size: int) -> int:
    return bucket(size, min_step=1)


class Sizes(NamedTuple):
    """Dimensions of a graph's inputs for one batch: T' tokens, B' sequences, S' slots of each in the padded view."""

    tokens: int
    sequences: int
    longest: int

    def holds(self, batch: PackedBatch, names: Collection[str] = ()) -> bool:
        """True if ``batch`` can be padded to these sizes for a graph that reads ``names``; each filler sequence may own
        a filler token."""
        fillers, spare = self.sequences - batch.batch_size, self.tokens - batch.num_computed
        longest = int(np.diff(batch.cu_seqlens).max())
        if fillers < 0 or spare < fillers or self.longest < longest:
            return False
        return _ALL_OWNED not in names or spare <= fillers * self.longest


def filled(sizes: Sizes, token_id: int, max_seq_len: int) -> PackedBatch:
    """A batch that uses all of ``sizes``: one long sequence, and others of about equal lengths. None is longer than the
    model's ``max_seq_len``, where its tables of positions end and sizes, which are rounded up, may not; ``sizes`` are
    such that so many of these hold all tokens."""
    others = sizes.sequences - 1
    longest = min(sizes.longest, sizes.tokens - others, max_seq_len)
    ends = longest + _ends(sizes.tokens - longest, others)
    cu_seqlens = np.concatenate([[0, longest], ends]).astype(np.int32)
    return PackedBatch(np.full(cu_seqlens[-1], token_id, np.int32), cu_seqlens)


def _ends(num_tokens: int, count: int) -> Int32Array:
    """Where ``count`` sequences end that share ``num_tokens`` tokens, as equally as possible."""
    return (np.arange(1, count + 1) * num_tokens // max(1, count)).astype(np.int32)


def position_ids_but(token_id: int) -> str:
    """The name in ``graph_inputs`` of positions that are counted over all tokens but ``token_id``.

    The id is a part of the name, so that the graph carries it.
    """
    return f"{_POSITIONS_BUT}{token_id}"


def pixel_levels(width: int) -> str:
    """The name in ``graph_inputs`` of the pixels of tokens that have ``width`` numbers each.

    The width is a part of the name: warm-up and measurements have sequences without pixels.
    """
    return f"{_PIXEL_LEVELS}{width}"


def label_vectors(width: int) -> str:
    """The name in ``graph_inputs`` of labels that are vectors of ``width`` numbers; a part of the name as in
    ``pixel_levels``."""
    return f"{_LABEL_VECTORS}{width}"


def image_features(width: int) -> str:
    """The name in ``graph_inputs`` of rows of an image tower of ``width`` numbers; a part of the name as in
    ``pixel_levels``."""
    return f"{_IMAGE_FEATURES}{width}"


def has_fixed_width(name: str) -> bool:
    """True if ``name``, or a longer one that an exporter made of it, is of an input whose second dimension it says."""
    return any(start in name for start in (_PIXEL_LEVELS, _LABEL_VECTORS, _IMAGE_FEATURES, image_positions.NAME))


def is_sized(batch: PackedBatch, names: Collection[str]) -> bool:
    """True if ``Sizes`` say all dimensions of the tensors ``names`` of ``batch``. They say not how many rows of images
    a decoder reads, nor how many windows images have."""
    return batch.features is None and not any(map(grid_windows.is_window, names))


def can_share(names: Collection[str]) -> bool:
    """True if a graph that reads ``names`` takes batches with shared tokens: its attention finds the keys of each
    sequence (``pad_index``, or ``SHARED_KEYS``), and no token knows which sequence it is in.

    Right only for causal models, whose states of a token depend on nothing behind it.
    """
    return not _not_shared(names)


def _not_shared(names: Collection[str]) -> set[str]:
    """Those of ``names`` that cannot be made where sequences share tokens."""
    rest = set(names) - _OF_SHARED_TOKENS - _PLACES - _OF_SEQUENCES - scored.NAMES
    return rest - {"cu_query_lens", *SHARED_KEYS} if rest.issuperset(SHARED_KEYS) else rest


def why_unshared(names: Collection[str], *, is_causal: bool) -> str | None:
    """Why an engine whose graph reads ``names`` computes each text whole, for people; None: it takes shared tokens."""
    if not is_causal:
        return "its tokens see those behind them"
    if not (rest := _not_shared(names)):
        return None
    reasons = (reason for start, reason in _NOT_SHARED.items() if any(name.startswith(start) for name in rest))
    return next(reasons, "its graph reads packed tokens by text")


def graph_inputs(
    batch: PackedBatch, names: Seq[str], sizes: Sizes | None = None
) -> dict[str, Int32Array | Float32Array]:
    """The tensors called ``names`` for ``batch``, every dimension rounded up to its bucket, or padded to ``sizes``.

    With T', B', S' the bucketed token total, batch size and longest sequence, int32 but for the mask:

    - ``input_ids``, ``token_type_ids``, ``position_ids`` [T']: per token; positions count from 0 in each sequence.
    - ``position_ids_but_N`` [T']: per token, how many tokens of its sequence, up to itself, are not N; 0 for
      those that are N.
    - ``pixel_levels_N`` float32 [T', N]: per token of an image, the levels (0 to 255) of its patch; zeros where the
      batch has none.
    - ``image_features_N`` float32 [R', N], ``feature_slots`` [T']: rows of the image tower behind one of zeros, and per
      token the row that stands for it; 0: its id does. Without images all rows are zeros.
    - ``time_ids``, ``row_ids``, ``column_ids``, and these with ``_of_blocks_N`` [T']: ``bei.engine.grid_positions``.
    - ``image_window_...``: ``bei.engine.grid_windows``.
    - ``position_shares_N``, ``position_shares_N_aligned_M`` float32 [T', N * N]: ``bei.engine.image_positions``.
    - ``token_seq_lens`` [T']: per token, how many tokens its sequence has.
    - ``sequence_ids`` [T']: per token, the number of its sequence.
    - ``key_lens`` [B']: how many leading tokens of each sequence are keys; all, unless the batch says otherwise.
    - ``key_mask`` float32 [B', S']: 1 where a slot holds such a token. ``token_key_lens`` [T']: per token,
      the ``key_lens`` of its sequence.
    - ``slot_ids`` [S']: 0, 1, 2, ...
    - ``seq_lens`` [B']: tokens of each sequence.
    - ``pad_index`` [B', S']: for each slot of the padded view, its packed token. Slots behind a
      sequence's end repeat its last token; graphs mask them by ``seq_lens``.
    - ``slot_mask`` float32 [B', S']: 1 where a slot holds a token of its sequence, else 0. ``pool_mask``: the same, but
      0 where the token is excluded from means.
    - ``token_pool_mask`` float32 [T']: per token, 0 where it is excluded from means, else 1. ``token_ones`` float32
      [T']: 1 for every token.
    - ``token_adapters`` [T']: per token, the adapter that reads its sequence; 0: none.
    - ``unpad_index`` [T']: for each packed token, its slot in the padded view flattened to [B' * S'].
    - ``first_index``, ``last_index`` [B']: the packed position of each sequence's first and last token.
    - ``cu_query_lens``, ``cu_key_lens`` [B' + 1]: the packed position of each sequence's first token, then the
      number of tokens. With them filler sequences own a filler token each, included in T' and in ``sequence_ids``.
      With ``cu_key_lens`` they own all filler tokens, so that the last number is T'.
    - ``shared_rows`` [R']: for each sequence, the packed positions of those tokens that it begins with and another
      sequence owns; ``cu_shared_lens`` [B' + 1]: where those of each begin. ``cu_query_lens`` is then of the tokens
      that sequences own, and all three have the sequences in the order in which these are packed.
    - ``word_slots``, ``word_reversal``, ``label_slots``, ``token_words``: ``bei.engine.words``; ``label_vectors_N``
      float32 [R', N]: its ``given_labels``. ``label_tokens`` and others of schemas: ``bei.engine.schema_columns``.
      ``entity_starts`` and others of pairs of entities: ``bei.engine.entity_pairs``. ``boundary_left`` and others of
      boundaries: ``bei.engine.boundaries``. ``pair_firsts`` and others of pairs of spans: ``bei.engine.span_pairs``.
    - ``scored_tokens``, ``scored_before``, ``token_scores``: ``bei.engine.scored``.

    Filler tokens are id 0 at position 0 and are not used; filler sequences have one token, packed token 0, because
    engines need not define attention over an empty sequence. The caller drops rows from B on.

    Of ``batch.shared`` only the computed tokens are packed. Sequences find theirs by ``pad_index``, ``first_index`` and
    ``last_index``, or by ``cu_query_lens`` and ``shared_rows``; positions, lengths and slots are those of whole
    sequences. ``unpad_index`` is a token's slot in one of the sequences that have it.
    """
    if batch.shared is not None:
        return _shared_inputs(batch, batch.shared, names, sizes)
    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    seq_lens = ends - starts
    num_tokens, batch_size = len(batch.input_ids), len(seq_lens)
    is_cumulative = not _CUMULATIVE.isdisjoint(names)
    fits = bucket if sizes is None else None
    if sizes is None:
        num_rows, width = bucket(batch_size, min_step=1), bucket(int(seq_lens.max()))
        fillers = num_rows - batch_size
        size = bucket(num_tokens + (fillers if is_cumulative else 0))
        if _ALL_OWNED in names:
            size = min(size, num_tokens + fillers * width)
        sizes = Sizes(size, num_rows, width)
    elif not sizes.holds(batch, names):
        raise ValueError(f"a batch of {num_tokens} tokens and {batch_size} sequences does not fit into {sizes}")
    num_rows, width = sizes.sequences, sizes.longest

    # Each numpy call delays a single query by microseconds, more if the engine has just emptied the caches.
    per_token = np.zeros((4, sizes.tokens), np.int32)
    input_ids, token_type_ids, position_ids, unpad_index = per_token
    input_ids[:num_tokens] = batch.input_ids
    if batch.token_type_ids is not None:
        token_type_ids[:num_tokens] = batch.token_type_ids
    positions, indices = position_ids[:num_tokens], np.arange(num_tokens, dtype=np.int32)
    np.subtract(indices, np.repeat(starts, seq_lens), out=positions)
    paddings = np.arange(0, batch_size * width, width, dtype=np.int32)
    np.add(positions, np.repeat(paddings, seq_lens), out=unpad_index[:num_tokens])

    first_index, padded_lens = np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32)
    first_index[:batch_size], padded_lens[:batch_size] = starts, seq_lens
    last_index = first_index + padded_lens - 1
    slots = np.arange(width, dtype=np.int32)
    pad_index = np.minimum(first_index[:, None] + slots, last_index[:, None])
    slot_mask = (slots < padded_lens[:, None]).astype(np.float32)

    tensors: dict[str, Int32Array | Float32Array] = {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "position_ids": position_ids,
        "unpad_index": unpad_index,
        "pad_index": pad_index,
        "slot_mask": slot_mask,
        "slot_ids": slots,
        "seq_lens": padded_lens,
        "first_index": first_index,
        "last_index": last_index,
    }
    if rest := frozenset(names).difference(tensors):  # of few models: one test for all of them
        _add_rare_inputs(tensors, rest, batch, sizes, fits)
    return {name: tensors[name] for name in names}


def _add_rare_inputs(
    tensors: dict[str, Int32Array | Float32Array],
    names: frozenset[str],
    batch: PackedBatch,
    sizes: Sizes,
    fits: Callable[[int], int] | None,
) -> None:
    """Add those called ``names`` to ``tensors``, which has what all models read."""
    num_tokens, batch_size, num_rows = len(batch.input_ids), batch.batch_size, sizes.sequences
    seq_lens = np.diff(batch.cu_seqlens)
    of_all = ("seq_lens", "slot_ids", "position_ids")
    padded_lens, slots, position_ids = (cast(Int32Array, tensors[name]) for name in of_all)
    if is_cumulative := not _CUMULATIVE.isdisjoint(names):
        num_owned = sizes.tokens - num_tokens if _ALL_OWNED in names else num_rows - batch_size
        ends = num_tokens + _ends(num_owned, num_rows - batch_size)
        tensors["cu_query_lens"] = np.concatenate([batch.cu_seqlens, ends], dtype=np.int32)
        tensors["cu_key_lens"] = tensors["cu_query_lens"].copy()  # an engine may bind it to memory of its own
        tensors["cu_shared_lens"] = np.zeros(num_rows + 1, np.int32)
        tensors["shared_rows"] = np.zeros(bucket(1), np.int32)
    if "sequence_ids" in names:
        sequence_ids = _per_token(np.arange(batch_size, dtype=np.int32), seq_lens, sizes.tokens)
        if is_cumulative:
            owned = np.diff(tensors["cu_query_lens"][batch_size:]).astype(np.int32)
            sequence_ids[num_tokens : num_tokens + num_owned] = np.repeat(
                np.arange(batch_size, num_rows, dtype=np.int32), owned
            )
        tensors["sequence_ids"] = sequence_ids
    if "token_ones" in names:
        tensors["token_ones"] = np.ones(sizes.tokens, np.float32)
    if "token_pool_mask" in names:
        tensors["token_pool_mask"] = np.ones(sizes.tokens, np.float32)
        if batch.unpooled_lens is not None:
            left_out = position_ids[:num_tokens] < np.repeat(batch.unpooled_lens, seq_lens)
            tensors["token_pool_mask"][:num_tokens][left_out] = 0.0
    if "token_adapters" in names:
        none = np.zeros(batch_size, np.int32)
        adapters = none if batch.adapters is None else batch.adapters
        tensors["token_adapters"] = _per_token(adapters, seq_lens, sizes.tokens)
    if "token_seq_lens" in names:
        tensors["token_seq_lens"] = _per_token(seq_lens, seq_lens, sizes.tokens)
    if not _KEYS.isdisjoint(names):
        key_lens = padded_lens.copy()
        if batch.key_lens is not None:
            key_lens[:batch_size] = batch.key_lens
        tensors["key_lens"] = key_lens
        tensors["key_mask"] = (slots < key_lens[:, None]).astype(np.float32)
        tensors["token_key_lens"] = _per_token(key_lens[:batch_size], seq_lens, sizes.tokens)
    if "pool_mask" in names:
        tensors["pool_mask"] = slot_mask = tensors["slot_mask"]
        if batch.unpooled_lens is not None:
            unpooled_lens = np.zeros(num_rows, np.int32)
            unpooled_lens[:batch_size] = batch.unpooled_lens
            tensors["pool_mask"] = slot_mask * (slots >= unpooled_lens[:, None])
    if rest := names.difference(tensors):
        _add_named_inputs(tensors, rest, batch, sizes, fits)


def _add_named_inputs(
    tensors: dict[str, Int32Array | Float32Array],
    names: frozenset[str],
    batch: PackedBatch,
    sizes: Sizes,
    fits: Callable[[int], int] | None,
) -> None:
    """Add those of words, schemas, scored tokens and images, and those whose names carry a number."""
    num_rows, position_ids = sizes.sequences, cast(Int32Array, tensors["position_ids"])
    if not words.NAMES.isdisjoint(names):
        tensors.update(words.word_inputs(batch, sizes.tokens, num_rows, _fine_bucket))
    if not entity_pairs.NAMES.isdisjoint(names):
        word_slots, token_words = (cast(Int32Array, tensors[name]) for name in ("word_slots", "token_words"))
        tensors.update(entity_pairs.entity_inputs(batch, names, word_slots, token_words, num_rows, _fine_bucket))
    if not boundaries.NAMES.isdisjoint(names):
        tensors.update(boundaries.boundary_inputs(batch, names, sizes.tokens, num_rows, _fine_bucket))
    if not span_pairs.NAMES.isdisjoint(names):
        tensors.update(span_pairs.pair_inputs(batch, names, sizes.tokens, num_rows, _fine_bucket))
    if not schema_columns.NAMES.isdisjoint(names):
        tensors.update(schema_columns.schema_inputs(batch, names, num_rows, _fine_bucket))
    if not scored.NAMES.isdisjoint(names):
        tensors.update(scored.scored_inputs(batch, sizes.tokens, fits))
    if FEATURE_SLOTS in names:
        name = next(name for name in names if name.startswith(_IMAGE_FEATURES))
        features = _features(int(name.removeprefix(_IMAGE_FEATURES)), batch, sizes.tokens)
        tensors[name], tensors[FEATURE_SLOTS] = features
    tensors.update(grid_positions.axis_inputs(names, batch, position_ids))
    tensors.update(grid_windows.window_inputs(names, batch, sizes.tokens, _fine_bucket))
    for name in names:
        if name.startswith(_PIXEL_LEVELS):
            tensors[name] = _levels(int(name.removeprefix(_PIXEL_LEVELS)), batch, sizes.tokens)
        elif name.startswith(_LABEL_VECTORS):
            labels = words.given_labels(batch, int(name.removeprefix(_LABEL_VECTORS)), num_rows, _fine_bucket)
            tensors[name], tensors["label_slots"] = labels
        elif (shares := image_positions.shares_in(name)) is not None:
            tensors[name] = image_positions.shares_of(shares, batch, sizes.tokens)
        elif name not in tensors:
            tensors[name] = _positions_but(_token_id(name), batch, position_ids)


def _shared_inputs(
    batch: PackedBatch, shared: SharedTokens, names: Seq[str], sizes: Sizes | None
) -> dict[str, Int32Array | Float32Array]:
    """The tensors of the whole batch, those of tokens cut down to the computed ones."""
    if not can_share(names) or batch.key_lens is not None:
        raise ValueError("a graph with these inputs has no tokens that sequences share")
    fits = bucket if sizes is None else None
    if sizes is None:
        longest, num_rows = int(np.diff(batch.cu_seqlens).max()), bucket(batch.batch_size, min_step=1)
        owned = num_rows - batch.batch_size if "cu_query_lens" in names else 0
        sizes = Sizes(bucket(batch.num_computed + owned), num_rows, bucket(longest))
    elif not sizes.holds(batch, names):
        raise ValueError(f"a batch of {batch.num_computed} computed tokens does not fit into {sizes}")
    fillers = sizes.sequences - batch.batch_size
    tensors = graph_inputs(batch._replace(shared=None), names, sizes._replace(tokens=batch.num_tokens + fillers))
    for name, values in tensors.items():
        if name in _OF_SHARED_TOKENS:
            tensors[name] = np.zeros(sizes.tokens, np.int32)
            tensors[name][: batch.num_computed] = values[shared.kept]
        elif name in _PLACES:
            tensors[name] = shared.places[values.astype(np.intp)]
    if "cu_query_lens" in names:
        tensors.update(_packed_keys(batch.cu_seqlens, shared, fillers))
    if not scored.NAMES.isdisjoint(names):
        found = scored.scored_inputs(batch, sizes.tokens, fits)
        tensors.update({name: found[name] for name in names if name in found})
    return tensors


def _packed_keys(cu_seqlens: Int32Array, shared: SharedTokens, fillers: int) -> dict[str, Int32Array]:
    """``cu_query_lens`` and ``SHARED_KEYS``; the sequences in the order in which their own tokens are packed, then
    ``fillers`` that own a token each."""
    starts = cu_seqlens[:-1]
    own = np.bincount(np.searchsorted(starts, shared.kept, side="right") - 1, minlength=len(starts))
    order = np.argsort(shared.places[cu_seqlens[1:] - 1], kind="stable")
    shared_lens = (np.diff(cu_seqlens) - own)[order]
    rows = [shared.places[start : start + length] for start, length in zip(starts[order], shared_lens, strict=True)]
    shared_rows = np.zeros(bucket(int(shared_lens.sum())), np.int32)
    np.concatenate(rows, out=shared_rows[: shared_lens.sum()])
    return {
        "cu_query_lens": np.cumsum([0, *own[order], *[1] * fillers], dtype=np.int32),
        "cu_shared_lens": np.cumsum([0, *shared_lens, *[0] * fillers], dtype=np.int32),
        "shared_rows": shared_rows,
    }


def rows_of_tokens(rows: Float32Array, batch: PackedBatch) -> Float32Array:
    """The computed rows of an output per token, [C, width], as those of all tokens, [T, width]."""
    return rows if batch.shared is None else rows[batch.shared.places]


def _token_id(name: str) -> int:
    """The id in a name made by ``position_ids_but``. Raises KeyError."""
    token_id = name.removeprefix(_POSITIONS_BUT)
    if token_id == name or not token_id.isdecimal():
        raise KeyError(name)
    return int(token_id)


def _positions_but(token_id: int, batch: PackedBatch, position_ids: Int32Array) -> Int32Array:
    """For each token, the number of tokens of its sequence, up to itself, that are not ``token_id``; 0 for ``token_id``
    itself and for filler.

    Int32 [T'], like the ``position_ids`` over all tokens.
    """
    counted, num_tokens = np.zeros_like(position_ids), len(batch.input_ids)
    np.add(position_ids[:num_tokens], 1, out=counted[:num_tokens])
    is_left_out = batch.input_ids == token_id
    if is_left_out.any():  # rare
        so_far = np.cumsum(is_left_out, dtype=np.int32)
        starts = batch.cu_seqlens[:-1]
        before = so_far[starts] - is_left_out[starts]
        counted[:num_tokens] -= so_far - np.repeat(before, np.diff(batch.cu_seqlens))
        counted[:num_tokens][is_left_out] = 0
    return counted


def _levels(width: int, batch: PackedBatch, size: int) -> Float32Array:
    """The pixels of ``batch``, float32 [size, width]; zeros for filler, and of a batch without images."""
    if batch.levels is None:
        return np.zeros((size, width), np.float32)
    levels = np.empty((size, width), np.float32)
    levels[: batch.num_tokens] = batch.levels
    levels[batch.num_tokens :] = 0.0
    return levels


def _features(width: int, batch: PackedBatch, size: int) -> tuple[Float32Array, Int32Array]:
    """Rows of the image tower behind one of zeros, float32 [R', width], and the row of each token, int32 [size]."""
    slots, table = np.zeros(size, np.int32), batch.features
    num_rows = 0 if table is None else len(table.rows)
    rows = np.zeros((bucket(num_rows + 1), width), np.float32)
    if table is not None:
        slots[: batch.num_tokens] = table.slots
        rows[1 : num_rows + 1] = table.rows[:, :width]  # filled up where the tower's tokens divide them unevenly
    return rows, slots


def _per_token(values: Int32Array, seq_lens: Int32Array, size: int) -> Int32Array:
    """``values`` [B] repeated for each token of its sequence, [size]; 0 for filler."""
    repeated = np.zeros(size, np.int32)
    repeated[: seq_lens.sum()] = np.repeat(values, seq_lens)
    return repeated
