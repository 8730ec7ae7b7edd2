"""The part of the chart's values.schema.json that lists the settings of ``bei serve``.

    python -m tests.deploy.settings_schema

writes it anew; tests/test_deploy.py fails where it is out of date.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from bei.config.settings import ServeConfig
from tests.deploy.files import SCHEMA

# Settings that other values of the chart decide.
OF_VALUES = frozenset(
    (
        *("models", "host", "port", "tcp", "uds", "uds_mode"),
        *("tls_cert", "tls_key", "tls_client_ca", "api_keys", "api_keys_file"),
        *("cache_dir", "cache_max_size", "require_signature"),
    )
)

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def settings_schema() -> dict[str, Any]:
    """Every setting that the chart leaves to its user, with its type, choices and range."""
    hints = typing.get_type_hints(ServeConfig)
    fields = [field for field in dataclasses.fields(ServeConfig) if field.name not in OF_VALUES]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: _schema_of(field, hints[field.name]) for field in fields},
    }


def _schema_of(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    kinds = [kind for kind in (typing.get_args(hint) if _is_optional(hint) else (hint,)) if kind is not type(None)]
    (kind,) = kinds
    schema: dict[str, Any] = {"description": field.metadata["help"]}
    if typing.get_origin(kind) is tuple:
        return {**schema, "type": "array", "items": {"type": "string", "pattern": "^[^,]+$"}}
    schema["type"] = _TYPES[kind]
    if field.metadata.get("choices"):
        schema["enum"] = [*field.metadata["choices"]]
    if (within := field.metadata.get("within")) is not None:
        schema["exclusiveMinimum" if within.above else "minimum"] = within.least
        schema["exclusiveMaximum" if within.below else "maximum"] = within.most
    return schema


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def main() -> None:
    """Write the file."""
    content = json.loads(SCHEMA.read_text("utf-8"))
    content["properties"]["settings"] = settings_schema()
    SCHEMA.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
