"""The answer of a handler before it is written."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from bei.errors import NotAcceptableError
from bei.server.endpoint.render import IN_JSON, IN_MSGPACK, Items, Notation, Octets
from bei.server.http.accept import MSGPACK, OCTETS
from bei.server.http.errors import JSON


class Reply(msgspec.Struct, frozen=True):
    """``content`` is what orjson writes, numpy arrays included; lists that may be large are ``Items``, on top or in
    objects. It is ``Octets`` where the request itself asks for bytes, whatever the client accepts. ``truncated`` lists
    the inputs that were cut, ``octets`` makes bytes of the answer's vectors, where it is nothing else, and ``report``
    says what became of each input."""

    content: object
    truncated: Seq[int] = ()
    octets: Callable[[], Octets] | None = None
    report: Items | None = None

    def written_in(self, media_types: Seq[str]) -> tuple[object, Notation, str]:
        """The content, its notation and its media type: the first of ``media_types`` that the answer can have.

        Raises NotAcceptableError where there is none.
        """
        if isinstance(self.content, Octets):
            return self.content, IN_JSON, OCTETS
        for media_type in media_types:
            if media_type in _NOTATIONS:
                content = self.content if self.report is None else self._with_report(self.report)
                return content, _NOTATIONS[media_type], media_type
            if self.octets is not None and self.report is None:
                return self.octets(), IN_JSON, media_type
        raise NotAcceptableError(
            f"This answer is no {' or '.join(media_types)}, which is for vectors alone: accept {JSON} or {MSGPACK}.",
            "accept",
        )

    def _with_report(self, report: Items) -> object:
        fields = self.content if isinstance(self.content, dict) else {"embeddings": self.content}
        return {**fields, "report": report}


_NOTATIONS = {notation.media_type: notation for notation in (IN_JSON, IN_MSGPACK)}
