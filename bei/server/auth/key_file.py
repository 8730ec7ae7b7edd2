"""API keys as an operator writes them: a YAML file, and the variable BEI_API_KEYS.

The file has a table by name. A string is one key; a list has several keys, all of them valid, for rotation:

    search: 4f1c9a7be2d0463fb8a1
    crawler:
      key: [a2d7c0ffb1e94d03, 0b5c8e13aa6f27d9]
      lane: bulk
      may_raise_lane: false
      requests_per_second: 20
      tokens_per_second: 50000

No message contains a key or quotes the file: for invalid YAML it gives the line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, get_args

from bei.errors import ConfigError
from bei.port import Lane
from bei.utils.named_files import MOST_SETTINGS_BYTES, named_bytes
from bei.utils.ranges import Range
from bei.utils.strict_yaml import YamlError, parsed

VARIABLE = "BEI_API_KEYS"

# The name of a key in the variable that has none.
DEFAULT_NAME = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET = re.compile(r"[\x21-\x7e]{1,512}")  # characters that a header can hold, and that no proxy strips
_LANES = get_args(Lane)
_RATES = Range(0, 1_000_000_000_000, above=True)


@dataclass(frozen=True)
class KeySpec:
    """The keys of one name, all of them valid (``secrets``), and their rights. ``lane``: of requests that ask for none;
    None: their size decides. ``may_raise_lane``: requests may ask for interactive although ``lane`` is bulk. Rates
    None: no limit.
    """

    name: str
    secrets: tuple[str, ...] = field(repr=False)
    lane: Lane | None = None
    may_raise_lane: bool = False
    requests_per_second: float | None = None
    tokens_per_second: float | None = None


_FIELDS = {"key"} | {one.name for one in fields(KeySpec)} - {"name", "secrets"}


def key_specs(file: str | None, entries: Seq[str]) -> list[KeySpec]:
    """All keys of ``file`` and ``entries``. An entry is ``NAME:KEY`` or a key.

    Raises ConfigError if the file cannot be read, has no key or an invalid one, or a name or key occurs twice.
    """
    specs = [] if file is None else _of_file(file)
    specs += _of_entries(entries)
    for names, what in ((Counter(spec.name for spec in specs), "name"), (_uses(specs), "key")):
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None and what == "name":
            raise ConfigError(f"The API key {twice} is in the file and in {VARIABLE}: keep one of them.")
        if twice is not None:
            users = " and ".join(spec.name for spec in specs if twice in spec.secrets)
            raise ConfigError(f"One API key stands under several names or twice ({users}): give each its own.")
    return specs


def _uses(specs: Seq[KeySpec]) -> Counter[str]:
    return Counter(secret for spec in specs for secret in spec.secrets)


def _of_entries(entries: Seq[str]) -> list[KeySpec]:
    """The keys of ``entries``. A name may occur several times: all its keys are valid."""
    found: dict[str, list[str]] = {}
    for place, entry in enumerate(entries, 1):
        name, colon, secret = entry.partition(":")
        name, secret = (name, secret) if colon else (DEFAULT_NAME, name)
        if not _NAME.fullmatch(name) or not _SECRET.fullmatch(secret):
            raise ConfigError(f"Entry {place} of {VARIABLE} is not NAME:KEY: {_FORM}.")
        found.setdefault(name, []).append(secret)
    return [KeySpec(name, tuple(secrets)) for name, secrets in found.items()]


_FORM = (
    "names are letters, digits and ._-, at most 64, keys printable ASCII characters without spaces, at most 512 (in "
    "quotes where YAML takes them for something else)"
)


def _of_file(file: str) -> list[KeySpec]:
    where = f"The API keys in {file}"
    table = _table(file, where)
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{where} must be a table of names, as 'search: KEY', and have one at least.")
    return [_spec(where, place, name, value) for place, (name, value) in enumerate(table.items(), 1)]


def _table(file: str, where: str) -> Any:
    content = named_bytes("The file of API keys", file, MOST_SETTINGS_BYTES)
    try:
        return parsed(content.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"{where} are no YAML in UTF-8: write 'name: key' lines.") from None
    except YamlError as error:
        if error.is_twice:
            raise ConfigError(f"{where} have a name twice in one table{error.place}: keep one.") from None
        raise ConfigError(f"{where} are no YAML{error.place}: write 'name: key' lines.") from None


def _spec(where: str, place: int, name: object, value: object) -> KeySpec:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name of entry {place} cannot be one: {_FORM}.")
    where = f"{where}, {name}"
    options = value if isinstance(value, dict) else {"key": value}
    unknown = next((option for option in options if option not in _FIELDS), None)
    if unknown is not None:
        near = get_close_matches(str(unknown), sorted(_FIELDS), n=1)  # anything else may be a key
        named = f"the option {unknown} is unknown, is it {near[0]}" if near else "an option is unknown"
        raise ConfigError(f"{where}: {named}: there are {', '.join(sorted(_FIELDS))}.")
    lane: Any = options.get("lane")
    if lane is not None and lane not in _LANES:
        raise ConfigError(f"{where}: lane must be {' or '.join(_LANES)}.")
    may_raise = options.get("may_raise_lane", False)
    if not isinstance(may_raise, bool):
        raise ConfigError(f"{where}: may_raise_lane must be true or false.")
    if may_raise and lane != "bulk":
        raise ConfigError(f"{where}: may_raise_lane is for keys whose lane is bulk: leave it out.")
    return KeySpec(
        name,
        _secrets(where, options.get("key")),
        lane,
        may_raise,
        _rate(where, options, "requests_per_second"),
        _rate(where, options, "tokens_per_second"),
    )


def _secrets(where: str, value: object) -> tuple[str, ...]:
    secrets = value if isinstance(value, list) else [value]
    if not secrets or not all(isinstance(secret, str) and _SECRET.fullmatch(secret) for secret in secrets):
        raise ConfigError(f"{where}: key must be a key or a list of them: {_FORM}.")
    return tuple(secrets)


def _rate(where: str, options: dict[str, object], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value not in _RATES:
        raise ConfigError(f"{where}: {name} must be a number {_RATES}.")
    return float(value)
