"""argparse's parser with abbreviations off, and errors of one line that say what may be meant.

Flags of builds and servers are derived from the configuration classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from bei.cli.help_texts import METAVARS
from bei.cli.other_servers_flags import instead_of
from bei.config.settings import ENV_PREFIX, ServeConfig
from bei.config.sources import BOOLEANS, BUILD_SETTINGS, listed
from bei.errors import ConfigError
from bei.utils.ranges import Range, shown

_METAVARS_OF_TYPES = {int: "N", float: "X"}
# Characters of a flag and its choices on a line of their own, at 80 columns.
_WIDEST = 72
_SERVE_SETTINGS = frozenset(field.name for field in dataclasses.fields(ServeConfig))
_OTHERS = "other settings"
# Of head sizes and compute capabilities.
_NUMBERS = Range(1, 65_536)
# Settings of builds that are no flags, or cannot hold for what a server builds.
_NO_FLAGS_OF_BUILDS = frozenset(("model", "out", "prompts", "sign_passphrase"))


class Parser(argparse.ArgumentParser):
    """Parsers of subcommands are of this class too. Wrong arguments raise ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter  # examples have lines of their own
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": as_written, **kwargs})
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith("?") else "."
        raise ConfigError(f"{message.removeprefix('argument ')}{stop} See '{self.prog} --help'.")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # argparse has overloads
        """Refuse what is unknown here, where it is known which command it was given to."""
        self._refuse_values_of_switches(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._refusal(unknown))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = _near(str(value), choices)
        if isinstance(action, argparse._SubParsersAction):
            if value in ("help", "version"):
                near = f": use --{value}"
            raise argparse.ArgumentError(None, f"no command {value!r}{near or f': {one_of(choices)}'}")
        raise argparse.ArgumentError(action, f"must be {one_of(choices)}, not {value!r}{near}")

    def _refusal(self, unknown: Sequence[str]) -> str:
        index = next((index for index, word in enumerate(unknown) if word.startswith("-")), None)
        if index is None:
            return f"unexpected argument {unknown[0]!r}"
        flag, equals, value = unknown[index].partition("=")
        value = value if equals else "".join(unknown[index + 1 : index + 2])
        own = list(self._option_string_actions)
        return _of_another_command(flag, self.prog) or instead_of(flag, value) or f"no flag {flag}{_near(flag, own)}"

    def _refuse_values_of_switches(self, words: Sequence[str]) -> None:
        """``--ui false`` would take a model for ``false``."""
        for word, following in pairwise([*words, ""]):
            flag, equals, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            is_meant = BOOLEANS.get((value if equals else following).lower())
            if isinstance(action, argparse.BooleanOptionalAction) and is_meant is not None:
                yes, no = action.option_strings
                self.error(f"{flag} takes no value: use {yes if is_meant is (flag == yes) else no}")


def _of_another_command(flag: str, prog: str) -> str | None:
    """The refusal of a flag that another one of our commands has."""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    command = prog.rpartition(" ")[2]
    if command in ("serve", "tune", "run-batch") and name in BUILD_SETTINGS - _NO_FLAGS_OF_BUILDS:
        return f"{flag} is a flag of 'bei build'; for what is built here set {ENV_PREFIX}{name.upper()}"
    if command in ("build", "tune", "run-batch") and name in _SERVE_SETTINGS:
        return f"{flag} is a flag of 'bei serve'"
    return None


def _near(word: str, words: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return f": did you mean {found[0]}?" if found else ""


def one_of(choices: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {shown(text)}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {shown(text)}") from None


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in ``64,128``."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) in _NUMBERS for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers {_NUMBERS} separated by commas, not {shown(text)}")
    return tuple(map(int, parts))


def add_fields(
    parser: argparse.ArgumentParser,
    config_class: type[Any],
    groups: Mapping[str, Sequence[str]],
    only: frozenset[str] | None = None,
) -> None:
    """Add an argument for each field, or for each field in ``only``. ``groups``: fields by the title under which help
    shows them.

    Flags that are not given are missing in the result, so that environment and file apply.
    """
    parser.add_argument("--config", metavar="FILE.yaml", help="the same settings in a file (flags and BEI_* win)")
    hints = typing.get_type_hints(config_class)
    titles = {name: title for title, names in groups.items() for name in names}
    fields = [
        field
        for field in dataclasses.fields(config_class)
        if not field.metadata.get("file_only") and (only is None or field.name in only)
    ]
    shown: dict[str, Any] = {}
    for title in (*groups, _OTHERS):
        if any(titles.get(field.name, _OTHERS) == title for field in fields if not field.metadata.get("positional")):
            shown[title] = parser.add_argument_group(title)
    for field in fields:
        if field.metadata.get("positional"):
            many = typing.get_origin(hints[field.name]) is tuple
            parser.add_argument(field.name, nargs="*" if many else "?", **_shown(field))
        else:
            _add_flag(shown[titles.get(field.name, _OTHERS)], field, hints[field.name])


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    flag = "--" + field.name.replace("_", "-")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if bool in kinds:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **_shown(field))
        return
    kind = next(kind for kind in kinds if kind is not type(None))
    is_list = typing.get_origin(kind) is tuple
    kind = str if is_list else kind
    choices = field.metadata.get("choices") or None
    metavar = None if choices else METAVARS.get(field.name) or _METAVARS_OF_TYPES.get(kind, "TEXT")
    shown = _shown(field)
    if choices and len(flag) + len(",".join(choices)) > _WIDEST:
        metavar, shown["help"] = "NAME", f"{shown['help']}; one of {', '.join(choices)}"
    if is_list:  # a flag that is given twice has both values
        group.add_argument(flag, type=listed, action="extend", metavar=metavar, **shown)
    else:
        group.add_argument(flag, type=kind, choices=choices, metavar=metavar, **shown)


def _shown(field: dataclasses.Field[Any]) -> dict[str, Any]:
    text = field.metadata["help"].replace("%", "%%")
    return {"default": argparse.SUPPRESS, "help": text + _default_text(field)}


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING or field.default in (None, "", ()):
        return ""
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f" (default: {default})"
