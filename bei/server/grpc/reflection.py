"""The reflection service: files of descriptions, by name or by what they describe."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from bei.errors import MalformedRequestError
from bei.server.grpc.http2.stream import Stream
from bei.server.grpc.messages import message, pool
from bei.server.grpc.status_codes import StatusCode


class ReflectionService:
    """Describes ``services``, in the messages of ``package``."""

    def __init__(self, package: str, services: Seq[str]) -> None:
        self._package = package
        self._services = sorted(services)

    async def run(self, stream: Stream) -> None:
        """An answer to each question. Raises BeiError."""
        from google.protobuf.message import DecodeError

        kind = message(f"{self._package}.ServerReflectionRequest")
        while (content := await stream.message()) is not None:
            try:
                request = kind.FromString(content)
            except DecodeError as error:
                raise MalformedRequestError(f"The message is not a {kind.DESCRIPTOR.full_name}: {error}.") from error
            stream.answer(self._answer(request).SerializeToString())
            await stream.answered()
        stream.finish(StatusCode.OK)

    def _answer(self, request: Any) -> Any:
        found = message(f"{self._package}.ServerReflectionResponse")(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        try:
            if asked == "list_services":
                for name in self._services:
                    found.list_services_response.service.add(name=name)
            elif asked == "file_by_filename":
                self._file(found, pool().FindFileByName(request.file_by_filename))
            elif asked == "file_containing_symbol":
                self._file(found, pool().FindFileContainingSymbol(request.file_containing_symbol))
            elif asked == "all_extension_numbers_of_type":
                name = pool().FindMessageTypeByName(request.all_extension_numbers_of_type).full_name
                found.all_extension_numbers_response.base_type_name = name  # there are none
            else:
                raise KeyError(asked)
        except KeyError:
            found.error_response.error_code = StatusCode.NOT_FOUND
            found.error_response.error_message = "There is no such thing here."
        return found

    @staticmethod
    def _file(found: Any, file: Any) -> None:
        """The files import no others."""
        found.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
