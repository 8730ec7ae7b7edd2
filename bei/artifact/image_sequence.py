"""How a decoder reads an image: tokens around the states of an image tower."""

from __future__ import annotations

import msgspec

from bei.core import Float32Array

# That stand in one input, at most: more can be asked of no model.
MOST_IMAGES = 64


class ImageSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a decoder reads an image: the tokens ``before``, a token ``token_id`` in the place of each state of the
    tower's, which has ``width`` numbers, and the tokens ``after``.

    ``around``: what stands before and behind an image among texts, of a model that reads both together: in the text of
    a pair, of a model that scores pairs (``before`` and ``after`` are then of a pair whose document is the image
    alone), or in one input, of a model that embeds. Unset: an image is read alone. ``most_images``: that may stand in
    one input or pair, each within ``around``; unset: one.

    ``merged_side``: a state stands for a block of so many patches a side; unset: for one patch. The tower's engine
    gives each patch of a block its part of the state, the last one with zeros behind its end where the parts are not
    equal, and blocks follow each other, patch by patch.
    """

    before: list[int]
    token_id: int
    after: list[int]
    width: int
    merged_side: int | msgspec.UnsetType = msgspec.UNSET
    around: tuple[str, str] | msgspec.UnsetType = msgspec.UNSET
    most_images: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def side(self) -> int:
        """Patches a side of what a state stands for."""
        return self.merged_side or 1

    @property
    def row_width(self) -> int:
        """Numbers of a state that the tower's engine gives for each patch."""
        return -(-self.width // self.side**2)

    def of_image(self, answer: Float32Array) -> Float32Array:
        """Of the vectors of an image's tokens those from its first state on: those in front may not have seen it."""
        return answer[len(self.before) :] if answer.ndim == 2 else answer

    def num_tokens(self, num_patches: int) -> int:
        """Of an image that has so many patches."""
        return len(self.before) + num_patches // self.side**2 + len(self.after)
