"""Asking what may fail: a failure is a reason, not a traceback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bei.errors import BeiError

ValueT = TypeVar("ValueT")


def reason_of(error: BaseException) -> str:
    """One line: bei's own errors explain themselves, others need their class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, BeiError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


@dataclass
class Unknowns:
    """What could not be found out, a sentence each."""

    sentences: list[str] = field(default_factory=list)

    def ask(self, what: str, function: Callable[..., ValueT], *arguments: object) -> ValueT | None:
        """The function's result, or None, with the reason noted.

        Every exception is caught: a report with a gap is of more use than none, whatever a foreign library raises.
        """
        try:
            return function(*arguments)
        except Exception as error:  # a fact that cannot be had is a fact too, with its reason
            self.note(what, reason_of(error))
            return None

    def note(self, what: str, why: str) -> None:
        """``what`` is not known because of ``why``."""
        self.sentences.append(f"{what}: {why}")
