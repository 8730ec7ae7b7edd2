"""Arrow's types, changed at any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def with_changed_parts(kind: pa.DataType, changed: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """``kind`` with ``changed`` applied to the types of which a list, a struct or a map is made; others as they are."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(changed(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(changed(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(changed(kind.value_type)), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(changed(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(changed(kind.key_type), changed(kind.item_type))
    return kind
