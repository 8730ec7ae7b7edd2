"""Adds environment variables to messages that name flags of ``bei build``, for ``bei serve`` and ``bei.Model``, which
build too but have other flags."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from bei.config.settings import ENV_PREFIX, ServeConfig
from bei.config.sources import BUILD_SETTINGS
from bei.errors import BeiError

_FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)")
_OF_SERVING = frozenset(field.name for field in fields(ServeConfig))


def with_variable_names(text: str, build_config: type) -> str:
    """``text``, followed by the variables that correspond to the build flags it names. ``build_config``: the class of
    the builder's settings."""
    hints = typing.get_type_hints(build_config)
    found: dict[str, None] = {}
    for negation, flag in _FLAG.findall(text):
        name = flag.replace("-", "_")
        if name in BUILD_SETTINGS - _OF_SERVING:
            is_switch = bool in (hints[name], *typing.get_args(hints[name]))
            found[ENV_PREFIX + name.upper() + (f"={str(not negation).lower()}" if is_switch else "")] = None
    if not found:
        return text
    return f"{text.rstrip('.')}. Flags of 'bei build' are variables here: {', '.join(found)}."


@contextmanager
def variables_in_errors(build_config: type) -> Iterator[None]:
    """A context in which the messages of build errors get ``with_variable_names``."""
    try:
        yield
    except BeiError as error:
        error.args = (with_variable_names(str(error), build_config),)
        raise
