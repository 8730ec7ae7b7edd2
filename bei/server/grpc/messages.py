"""The message classes and services of the ``.proto`` files, in a pool of their own: a client in the same process may
have files with the same messages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.server.grpc.proto_file import read_proto

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.descriptor_pool import DescriptorPool

FILES = ("tei.proto", "inference.proto")
TEI, INFERENCE = "tei.v1", "inference"


@cache
def pool() -> DescriptorPool:
    """The descriptors of all files, and of the library's services."""
    from google.protobuf.descriptor_pool import DescriptorPool

    found = DescriptorPool()
    for name in FILES:
        text = (Path(__file__).parent / name).read_text("utf-8")
        found.AddSerializedFile(read_proto(f"bei/{name}", text).SerializeToString())
    return found


@cache
def message(full_name: str) -> Any:
    """The class of the message of this name, package included."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool().FindMessageTypeByName(full_name))


def services() -> list[ServiceDescriptor]:
    """All services."""
    files = (pool().FindFileByName(f"bei/{name}") for name in FILES)
    return [service for file in files for service in file.services_by_name.values()]
