"""YAML that a person writes: a name that stands twice in a table is refused, and no error quotes the text, which may
have secrets."""

from __future__ import annotations

from typing import Any

import yaml


class YamlError(ValueError):
    """``is_twice``: a name stands twice in a table; else it is no YAML. ``place``: the line in brackets behind a space,
    empty where none is known."""

    def __init__(self, line: int | None, *, is_twice: bool = False) -> None:
        self.place = "" if line is None else f" (line {line + 1})"
        self.is_twice = is_twice
        super().__init__(self.place)


def parsed(text: str) -> Any:
    """The content of ``text``. Raises YamlError."""
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's own text would quote the line
        raise YamlError(None if mark is None else mark.line) from None
    except Exception:  # of a text that is tagged as a date, say, YAML's constructors raise anything
        raise YamlError(None) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader would drop one of two values of a name silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's. Raises YamlError."""
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue  # not a name: SafeLoader or the caller refuses it
            if name.value in seen:
                raise YamlError(name.start_mark.line, is_twice=True)
            seen.add(name.value)
        return super().construct_mapping(node, deep)
