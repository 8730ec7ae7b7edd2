"""The message classes and services of the ``.proto`` files, in a pool of their own: a client in the same process may
have files with the same messages.

``descriptors.binpb`` is what protoc makes of the files, in the form that every version of protobuf reads. Where one
was changed, in this folder: ``python -m grpc_tools.protoc -I. --descriptor_set_out=descriptors.binpb *.proto``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.core import Float32Array

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.descriptor_pool import DescriptorPool

FILES = ("tei.proto", "inference.proto")
TEI, INFERENCE = "tei.v1", "inference"


@cache
def pool() -> DescriptorPool:
    """The descriptors of all files, and of the library's services."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    found = DescriptorPool()
    for file in FileDescriptorSet.FromString((Path(__file__).parent / "descriptors.binpb").read_bytes()).file:
        file.name = f"bei/{file.name}"
        found.AddSerializedFile(file.SerializeToString())
    return found


@cache
def message(full_name: str) -> Any:
    """The class of the message of this name, package included."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool().FindMessageTypeByName(full_name))


def float_field(number: int, values: Float32Array) -> bytes:
    """The field ``repeated float`` of this number, as it stands in a message: of ``values`` float32 [n].

    A message takes numbers one by one, which makes an object of each; as bytes it takes all at once.
    """
    return bytes_field(number, values.astype("<f4", copy=False).tobytes())


def bytes_field(number: int, content: bytes) -> bytes:
    """A field of this number (at most 15) that has a length: a message, bytes, or packed numbers."""
    return field_head(number, len(content)) + content


def field_head(number: int, size: int) -> bytes:
    """What stands in front of the content of such a field."""
    head = bytearray((number << 3 | 2,))
    while size >= 128:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head)


def services() -> list[ServiceDescriptor]:
    """All services."""
    files = (pool().FindFileByName(f"bei/{name}") for name in FILES)
    return [service for file in files for service in file.services_by_name.values()]
