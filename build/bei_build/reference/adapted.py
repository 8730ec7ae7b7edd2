"""The reference of an engine with adapters: one of the model with each adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby

from bei.core import Encoding
from bei.verification.engine_answers import Rows, joined
from bei_build.reference.held_out import Reference

# Opens the reference of the model with one adapter merged, by its id.
OpenReference = Callable[[int], AbstractContextManager[Reference]]


class AdaptedReference:
    """Answers each text by the model with the text's adapter merged: another computation than the engine's, which has
    low-rank terms beside the weights. One model is in memory at a time. ``names``: of the adapters."""

    def __init__(self, open_reference: OpenReference, names: Sequence[str], stack: ExitStack) -> None:
        self._open = open_reference
        self._stack = stack
        self._current: tuple[int, Reference] | None = None
        first = self._of(0)
        self.name = f"{first.name}, with each adapter merged ({', '.join(names)}) and with none"
        self.is_own = first.is_own

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Rows:
        """As ``Reference`` has it."""
        groups = groupby(encodings, key=lambda encoding: encoding.adapter)
        return joined([self._of(adapter).run([*texts], outputs) for adapter, texts in groups])

    def _of(self, adapter: int) -> Reference:
        if self._current is None or self._current[0] != adapter:
            self._current = None  # before the next one is opened
            self._stack.close()
            self._current = adapter, self._stack.enter_context(self._open(adapter))
        return self._current[1]
