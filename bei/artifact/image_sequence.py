"""How a decoder reads an image: tokens around the states of an image tower."""

from __future__ import annotations

import msgspec


class ImageSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a decoder reads an image: the tokens ``before``, a token ``token_id`` in the place of each state of the
    tower's, which has ``width`` numbers, and the tokens ``after``."""

    before: list[int]
    token_id: int
    after: list[int]
    width: int

    def num_tokens(self, num_states: int) -> int:
        """Of an image that has so many states."""
        return len(self.before) + num_states + len(self.after)
