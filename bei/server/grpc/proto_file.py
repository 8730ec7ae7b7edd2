"""Reads the ``.proto`` files beside this one, which clients can compile, into the descriptors of protobuf.

Only protoc reads such files otherwise, a compiler that a server would carry along for two of them; its output is
generated code, of one version of protobuf. The language is read as far as these files go: messages, nested ones, enums,
``optional``, ``repeated``, ``map`` and ``oneof`` fields, services and their streams. Anything else is an error.
Reference: protobuf.dev, "Protocol Buffers Version 3 Language Specification". A test compares with what protoc makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

_TOKEN = re.compile(r'\s+|//[^\n]*|("[^"]*"|[\w.]+|[{}()<>=;,])')


class _Reader:
    """The tokens of a file, and what is made of them."""

    def __init__(self, text: str) -> None:
        from google.protobuf import descriptor_pb2

        self._pb = descriptor_pb2
        self._tokens = _tokens(text)
        self._next = next(self._tokens, "")

    def file(self, name: str) -> FileDescriptorProto:
        """The whole file."""
        found = self._pb.FileDescriptorProto(name=name, syntax="proto3")
        while self._next:
            kind = self._take()
            if kind == "syntax":
                self._expect("=", '"proto3"', ";")
            elif kind == "package":
                found.package = self._take()
                self._expect(";")
            elif kind == "message":
                self._message(found.message_type.add())
            elif kind == "enum":
                self._enum(found.enum_type.add())
            else:
                self._must(kind, "service")
                self._service(found.service.add())
        return found

    def _message(self, message: DescriptorProto) -> None:
        message.name = self._take()
        self._expect("{")
        optional = []
        while self._next != "}":
            kind = self._take()
            if kind == "message":
                self._message(message.nested_type.add())
            elif kind == "map":
                self._map(message)
            elif kind == "oneof":
                self._oneof(message)
            elif kind in ("optional", "repeated"):
                field = self._field(message, self._take(), is_list=kind == "repeated")
                optional += [field] if kind == "optional" else []
            else:
                self._field(message, kind)
        self._expect("}")
        for field in optional:  # as protoc does: a oneof of one field each, behind all others
            field.oneof_index, field.proto3_optional = len(message.oneof_decl), True
            message.oneof_decl.add(name=f"_{field.name}")

    def _oneof(self, message: DescriptorProto) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._take())
        self._expect("{")
        while self._next != "}":
            self._field(message, self._take()).oneof_index = index
        self._expect("}")

    def _map(self, message: DescriptorProto) -> None:
        self._expect("<")
        key = self._take()
        self._expect(",")
        value = self._take()
        self._expect(">")
        entry = f"{self._next.title().replace('_', '')}Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        self._typed(nested.field.add(name="key", number=1), key)
        self._typed(nested.field.add(name="value", number=2), value)
        self._field(message, entry, is_list=True)

    def _field(self, message: DescriptorProto, kind: str, *, is_list: bool = False) -> Any:
        field = message.field.add(name=self._take())
        self._expect("=")
        field.number = int(self._take())
        self._expect(";")
        self._typed(field, kind, is_list=is_list)
        return field

    def _typed(self, field: Any, kind: str, *, is_list: bool = False) -> None:
        types = self._pb.FieldDescriptorProto
        field.label = types.LABEL_REPEATED if is_list else types.LABEL_OPTIONAL
        scalar = getattr(types, f"TYPE_{kind.upper()}", None)
        if scalar is None:
            field.type_name = kind  # a message or an enum: the pool finds it
        else:
            field.type = scalar

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._take()
        self._expect("{")
        while self._next != "}":
            value = enum.value.add(name=self._take())
            self._expect("=")
            value.number = int(self._take())
            self._expect(";")
        self._expect("}")

    def _service(self, service: Any) -> None:
        service.name = self._take()
        self._expect("{")
        while self._next != "}":
            self._expect("rpc")
            method = service.method.add(name=self._take())
            method.client_streaming, method.input_type = self._side()
            self._expect("returns")
            method.server_streaming, method.output_type = self._side()
            self._expect(";")
        self._expect("}")

    def _side(self) -> tuple[bool, str]:
        self._expect("(")
        kind = self._take()
        is_stream = kind == "stream"
        if is_stream:
            kind = self._take()
        self._expect(")")
        return is_stream, kind

    def _take(self) -> str:
        found, self._next = self._next, next(self._tokens, "")
        return found

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            self._must(self._take(), token)

    @staticmethod
    def _must(found: str, token: str) -> None:
        if found != token:
            raise ValueError(f"{token!r} must stand where {found!r} does")


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at]!r} is not read here")
        at = match.end()
        if match[1]:
            yield match[1]


def read_proto(name: str, text: str) -> FileDescriptorProto:
    """The descriptor of the file ``name`` with this ``text``. Raises ValueError for what is not read here."""
    return _Reader(text).file(name)
