"""Labels to encodings, for a tower of labels. What ``TextEncoder`` is for texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bei.core import Encoding, Float32Array, LabelVectors
from bei.errors import InputTooLongError, InvalidRequestError
from bei.tokenizer.encoder import EncodingOptions, TextEncoder

# Half of a label would be another one.
_WHOLE = EncodingOptions(truncate=False)
_DIGEST_BYTES = 16


class LabelText(str):
    """A label of a request, for the tower of labels."""

    __slots__ = ()


def vectors_of(rows: Float32Array) -> LabelVectors:
    """The labels whose vectors are ``rows`` [labels, width]."""
    return LabelVectors(rows, hashlib.blake2b(rows.tobytes(), digest_size=_DIGEST_BYTES).digest())


class LabelEncoder:
    """Encodings of labels by the tower's own tokenizer, with its special tokens. Safe in threads."""

    def __init__(self, encoder: TextEncoder, max_seq_len: int) -> None:
        self._encoder = encoder
        self._max_seq_len = max_seq_len

    def encode(
        self,
        inputs: Seq[LabelText],
        options: object = None,
        common: object = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Encoding]:
        """The encodings of ``inputs``. Options are of texts, and change nothing. ``check`` as in ``TextEncoder``.
        Raises InvalidRequestError."""
        try:
            found = self._encoder.encode([str(label) for label in inputs], _WHOLE, check=check)
        except InputTooLongError as error:
            raise InvalidRequestError(
                f"A label has more than the {self._max_seq_len} tokens that the model reads of one: shorten it.",
                "labels",
            ) from error
        return [encoding._replace(is_label=True) for encoding in found]
