"""The health service, which follows the probes over HTTP: github.com/grpc/grpc, doc/health-checking.md."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from typing import Any

from bei.errors import MalformedRequestError
from bei.server.grpc.http2.stream import Stream
from bei.server.grpc.messages import HEALTH, message
from bei.server.grpc.status_codes import StatusCode

SERVICE = f"{HEALTH}.Health"
_SERVING, _NOT_SERVING, _UNKNOWN_SERVICE = 1, 2, 3


class HealthService:
    """The state of ``services``, and of the server, whose name is empty."""

    def __init__(self, services: Seq[str]) -> None:
        self._services = {"", *services}
        self._is_serving = False
        self._changed = asyncio.Event()

    def set(self, *, is_serving: bool) -> None:
        """Tell the state of all."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _UNKNOWN_SERVICE
        return _SERVING if self._is_serving else _NOT_SERVING

    def _answer(self, status: int) -> Any:
        return message(f"{HEALTH}.HealthCheckResponse")(status=status)

    async def check(self, stream: Stream) -> None:
        """The state of a service. Raises BeiError."""
        service = _request(stream.only_message(), "HealthCheckRequest").service
        status = self._status(service)
        if status == _UNKNOWN_SERVICE:
            stream.finish(StatusCode.NOT_FOUND, f"There is no service {service[:80]!r} here.")
        else:
            stream.finish(StatusCode.OK, message=self._answer(status).SerializeToString())

    async def list(self, stream: Stream) -> None:
        """The states of all. Raises BeiError."""
        _request(stream.only_message(), "HealthListRequest")
        found = message(f"{HEALTH}.HealthListResponse")()
        for service in self._services:
            found.statuses[service].CopyFrom(self._answer(self._status(service)))
        stream.finish(StatusCode.OK, message=found.SerializeToString())

    async def watch(self, stream: Stream) -> None:
        """The state of a service, now and whenever it changes. Raises BeiError."""
        service = _request(stream.only_message(), "HealthCheckRequest").service
        told = 0
        while not stream.is_closed:
            changed, status = self._changed, self._status(service)
            if status != told:
                told = status
                stream.answer(self._answer(status).SerializeToString())
            await changed.wait()


def _request(content: bytes, kind: str) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return message(f"{HEALTH}.{kind}").FromString(content)
    except DecodeError as error:
        raise MalformedRequestError(f"The message is not a {HEALTH}.{kind}: {error}.") from error
