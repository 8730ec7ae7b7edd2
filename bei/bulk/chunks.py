"""Cuts texts into chunks that the model reads whole: consecutive tokens, with some of the chunk before in front."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from bei.bulk.shard_service import ShardService
from bei.core import TokenSpans
from bei.errors import ConfigError
from bei.service.call import ModelRequest
from bei.tokenizer.encoder import EncodingOptions

_WHOLE = EncodingOptions(add_special_tokens=False, whole=True, with_spans=True)


class ChunkSize(NamedTuple):
    """A chunk has at most ``tokens``, special ones and those of a prompt not counted; ``overlap`` of them are also the
    end of the chunk before."""

    tokens: int
    overlap: int = 0

    def check(self, max_seq_len: int) -> None:
        """Raise ConfigError for chunks that the model cannot read, or that get no further."""
        if not self.tokens < max_seq_len:
            raise ConfigError(
                f"--chunk-tokens must be below {max_seq_len}, which the model reads with special tokens; it is "
                f"{self.tokens}."
            )
        if not self.overlap < self.tokens:
            raise ConfigError(f"--chunk-overlap must be below --chunk-tokens, and {self.overlap} is not.")


class TextChunk(NamedTuple):
    """Characters ``start`` to ``stop`` of the text. ``number``: among its chunks, from 0."""

    start: int
    stop: int
    number: int


async def chunks_of(service: ShardService, texts: Seq[str], size: ChunkSize) -> list[list[TextChunk]]:
    """The chunks of each text, at least one. A text that cannot be tokenized is one chunk."""
    with service.ticket(len(texts)) as ticket:
        encodings = await service.encode(ModelRequest(texts, _WHOLE, failed={}), ticket=ticket)
    return [
        [TextChunk(0, len(text), 0)] if encoding.spans is None or not encoding.num_tokens else cut(encoding.spans, size)
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def cut(spans: TokenSpans, size: ChunkSize) -> list[TextChunk]:
    """Chunks of a text with the tokens ``spans`` (at least one). They begin and end with words, where a chunk holds one
    from its beginning to its end."""
    words, offsets = spans.words.tolist(), spans.offsets.tolist()
    num_tokens = len(words)

    def last_boundary(start: int, stop: int) -> int | None:
        """The last place behind ``start``, up to ``stop``, where a word ends."""
        places = range(stop, start, -1)
        return next((at for at in places if at == num_tokens or words[at] != words[at - 1]), None)

    chunks: list[TextChunk] = []
    start, done = 0, 0  # of the next chunk, and of all tokens so far
    while True:
        most = min(start + size.tokens, num_tokens)
        stop = last_boundary(done, most) or most
        chunks.append(TextChunk(offsets[start][0], offsets[stop - 1][1], len(chunks)))
        if stop == num_tokens:
            return chunks
        # As many words of the last chunk as are asked for, unless no further one would then be whole.
        again = [at for at in range(max(start + 1, stop - size.overlap), stop) if words[at] != words[at - 1]]
        start = next((at for at in again if last_boundary(stop, min(at + size.tokens, num_tokens))), stop)
        done = stop
