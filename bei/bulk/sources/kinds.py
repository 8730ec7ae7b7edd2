"""What a column of an input can hold of the things that models read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

if TYPE_CHECKING:
    import pyarrow as pa

# A text; token ids of one input; several texts that are read together; the bytes of an image's file; several such of
# one input; a text and an image of one input; a text and several images.
Kind: TypeAlias = Literal["text", "ids", "texts", "image", "images", "both", "text and images"]

_ALL: frozenset[Kind] = frozenset(get_args(Kind))


class ColumnKinds(NamedTuple):
    """``kinds``: what values of the column can be; none: no model reads any. ``shown``: its type, for people."""

    kinds: frozenset[Kind]
    shown: str


# Columns without types.
STRINGS = ColumnKinds(frozenset(("text",)), "strings")
JSON_VALUES = ColumnKinds(frozenset(("text", "ids", "texts")), "JSON's values")


def kinds_of(column: pa.DataType) -> ColumnKinds:
    """Of a column of Arrow's type ``column``."""
    return ColumnKinds(_kinds(column), str(column))


def _kinds(column: pa.DataType) -> frozenset[Kind]:
    import pyarrow as pa

    types = pa.types
    if isinstance(column, pa.BaseExtensionType):
        return _kinds(column.storage_type)
    if types.is_null(column):
        return _ALL  # rows without a value, of whatever kind the others are
    if types.is_dictionary(column):
        return _kinds(column.value_type)
    if types.is_string(column) or types.is_large_string(column) or types.is_string_view(column):
        return frozenset(("text",))
    if _is_bytes(column):
        return frozenset(("image",))
    if types.is_struct(column):
        return _kinds_of_struct(column)
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        if types.is_integer(column.value_type):
            return frozenset(("ids",))
        several: dict[Kind, Kind] = {"text": "texts", "image": "images"}
        return frozenset(several[kind] for kind in several if kind in _kinds(column.value_type))
    return frozenset()


def _kinds_of_struct(column: pa.StructType) -> frozenset[Kind]:
    fields = {field.name: field.type for field in column}
    if fields.keys() == {"text", "image"}:
        beside: dict[Kind, Kind] = {"image": "both", "images": "text and images"}
        images = _kinds(fields["image"]) if "text" in _kinds(fields["text"]) else ()
        return frozenset(beside[kind] for kind in images if kind in beside)
    return frozenset(("image",)) if "bytes" in fields and _is_bytes(fields["bytes"]) else frozenset()  # of datasets


def _is_bytes(column: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    of_bytes = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(is_such(column) for is_such in of_bytes)
