"""Token ids on their way to another process: messages with what is known of them, and their arrays as raw bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei.core import Encoding, Int32Array, PackedBatch
from bei.multiprocess.transport.messages import ItemHead, Run, Submit
from bei.port import Item, Submission

_Bytes = npt.NDArray[np.uint8]


def submitted(submission: Submission, number: int) -> tuple[Submit, list[Int32Array]]:
    """``submission`` as a message. Spans stay behind: nobody reads them there."""
    items = submission.items
    heads = [
        ItemHead(
            place,
            len(encoding.input_ids),
            encoding.token_type_ids is not None,
            encoding.truncated,
            encoding.num_keys,
            encoding.num_unpooled,
        )
        for place, encoding in items
    ]
    arrays = [encoding.input_ids for _, encoding in items]
    arrays += [encoding.token_type_ids for _, encoding in items if encoding.token_type_ids is not None]
    message = Submit(number, submission.request_id, submission.lane, submission.outputs, submission.deadline_s, heads)
    if len(arrays) == 1:  # of a single text: to join takes longer than to send
        return message, [np.ascontiguousarray(arrays[0], np.int32)]
    return message, [np.concatenate(arrays, dtype=np.int32)] if arrays else []


def submission_of(message: Submit, payload: _Bytes, request_id: int) -> Submission:
    """The inverse of ``submitted``, under another number."""
    values = payload.view(np.int32)
    start, types_start = 0, sum([head.num_tokens for head in message.items])
    items = []
    for place, num_tokens, has_types, truncated, num_keys, num_unpooled in message.items:
        end = start + num_tokens
        types = None
        if has_types:
            types = values[types_start : types_start + num_tokens]
            types_start += num_tokens
        items.append(Item(place, Encoding(values[start:end], types, truncated, None, num_keys, num_unpooled)))
        start = end
    return Submission(request_id, message.lane, message.outputs, items, message.deadline_s)


def run_of(batch: PackedBatch, outputs: frozenset[str] | None, number: int) -> tuple[Run, list[Int32Array]]:
    """A step as a message."""
    optional = (batch.token_type_ids, batch.key_lens, batch.unpooled_lens)
    has_types, has_key_lens, has_unpooled_lens = (values is not None for values in optional)
    message = Run(
        number,
        None if outputs is None else list(outputs),
        batch.num_tokens,
        batch.batch_size,
        has_types,
        has_key_lens,
        has_unpooled_lens,
    )
    arrays = [batch.input_ids, batch.cu_seqlens, *(values for values in optional if values is not None)]
    return message, [np.ascontiguousarray(values, np.int32) for values in arrays]


def batch_of(message: Run, payload: _Bytes) -> PackedBatch:
    """The inverse of ``run_of``, but for the outputs."""
    values = payload.view(np.int32)
    start = 0

    def next_array(size: int) -> Int32Array:
        nonlocal start
        start += size
        return values[start - size : start]

    size = message.batch_size
    return PackedBatch(
        next_array(message.num_tokens),
        next_array(size + 1),
        next_array(message.num_tokens) if message.has_types else None,
        next_array(size) if message.has_key_lens else None,
        next_array(size) if message.has_unpooled_lens else None,
    )
