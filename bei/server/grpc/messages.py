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
HEALTH = "grpc.health.v1"
REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")  # one file; clients of today still ask for the second


@cache
def pool() -> DescriptorPool:
    """The descriptors of all files."""
    from google.protobuf.descriptor_pool import DescriptorPool

    found = DescriptorPool()
    for name in (*FILES, "health.proto", "reflection.proto"):
        found.AddSerializedFile(read_proto(f"bei/{name}", _text(name)).SerializeToString())
    newer, older = REFLECTION
    text = _text("reflection.proto").replace(f"package {newer};", f"package {older};")
    found.AddSerializedFile(read_proto("bei/reflection_v1alpha.proto", text).SerializeToString())
    return found


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text("utf-8")


@cache
def message(full_name: str) -> Any:
    """The class of the message of this name, package included."""
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool().FindMessageTypeByName(full_name))


def services() -> list[ServiceDescriptor]:
    """All services of models."""
    files = (pool().FindFileByName(f"bei/{name}") for name in FILES)
    return [service for file in files for service in file.services_by_name.values()]
