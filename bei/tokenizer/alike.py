"""Labels of a request that a model cannot tell apart, since they have the same tokens: case, blanks, accents and
characters that a tokenizer does not know leave none. They would have the same score, as if it were found."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq

from bei.errors import InvalidRequestError


def check_told_apart(what: str, names: Seq[str], tokens: Iterable[Hashable], param: str) -> None:
    """Raise InvalidRequestError, of the field ``param``, where two of ``names`` have the same ``tokens``. ``what``
    they are, for the message."""
    seen: dict[Hashable, int] = {}
    for place, key in enumerate(tokens):
        first = seen.setdefault(key, place)
        if first != place:
            raise InvalidRequestError(
                f"{what} {first} and {place}, {names[first][:40]!r} and {names[place][:40]!r}, have the same tokens: "
                "the model cannot tell them apart. Leave one out, or word it otherwise.",
                param,
            )
