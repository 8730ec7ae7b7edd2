"""Messages name only flags and variables that their reader has."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from bei.cli import main
from bei.cli.other_servers_flags import INSTEAD
from bei.config.build_flags import variables_in_errors, with_variable_names
from bei.config.settings import ServeConfig
from bei.errors import BeiError, MissingDependencyError, VerificationError
from bei_build.config import BuildConfig

ROOT = Path(__file__).parents[3]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMANDS = (
    "build",
    "sign",
    "serve",
    "tune",
    "run-batch",
    "embed",
    "verify",
    "inspect",
    "cache",
    "doctor",
    "simulate",
    "bench",
)
# Of pip, of docker, and of llama.cpp.
OF_OTHERS = {
    "--no-deps",
    "--index-url",
    "--upgrade",
    "--gpus",
    "--merge",
    *(flag for flags in INSTEAD for flag in flags),
}
# Their two hyphens are no flag's: custom properties of style sheets, names of modules of repositories.
NO_FLAGS = (
    "bei/utils/html/",
    "bei/cli/bench/report.py",
    "bei/utils/untrusted_files.py",
    "build/bei_build/checkpoint/remote_code.py",
)


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from flags_of(one)


def all_flags() -> set[str]:
    given = [(command, [command]) for command in COMMANDS] + [("bench", ["bench", "compare"])]
    return {flag for command, words in given for flag in flags_of(main._parser(command, words))}


def messages_of_the_code() -> Iterator[tuple[str, str]]:
    """Texts in the code that name flags, docstrings apart, by the place; of f-strings the parts that are fixed."""
    for root in (ROOT / "bei", ROOT / "build" / "bei_build"):
        for path in sorted(root.rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            content = path.read_text("utf-8")
            if place.startswith(NO_FLAGS[:3]) or "--" not in content:  # parsing all files takes seconds
                continue
            tree = ast.parse(content)
            documents = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                    text = "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and id(node) not in documents | inside:
                    text = node.value if isinstance(node.value, str) else ""
                else:
                    continue
                if FLAG.search(text):
                    yield f"{place}:{node.lineno}", text


@pytest.fixture(scope="module")
def messages() -> list[tuple[str, str]]:
    return list(messages_of_the_code())


@pytest.fixture(scope="module")
def of_builds(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of thresholds.py the runtime says too, behind "Build it again:"."""
    return [one for one in messages if one[0].startswith(("build/", "bei/artifact/certificate/thresholds.py"))]


def test_every_flag_that_is_named_is_a_flag_of_some_command(messages: list[tuple[str, str]]) -> None:
    known = all_flags() | OF_OTHERS
    assert len(messages) > 150  # else nothing is looked at
    unknown = {place: flag for place, text in messages for flag in FLAG.findall(text) if flag not in known}
    assert unknown == {}


def test_a_server_s_messages_name_flags_of_builds_only_where_they_speak_of_a_build(
    messages: list[tuple[str, str]], of_builds: list[tuple[str, str]]
) -> None:
    """The runtime's own: what a build says is worded when it is raised."""
    flags_of_builds = {
        f"--{no}{name.replace('_', '-')}"
        for name in {field.name for field in fields(BuildConfig)} - {field.name for field in fields(ServeConfig)}
        for no in ("", "no-")
    }
    of_other_commands = ("bei/cli/", "bei/bulk/", "bei/ray/")
    mute = [
        f"{place}: {text}"
        for place, text in messages
        if (place, text) not in of_builds
        and not place.startswith(of_other_commands)
        and flags_of_builds & set(FLAG.findall(text))
        and not re.search(r"\bbuil[dt]", text, re.IGNORECASE)
    ]
    assert mute == []


def test_what_a_build_of_a_server_says_names_what_the_server_has(of_builds: list[tuple[str, str]]) -> None:
    names = {field.name for field in fields(BuildConfig)}
    served = {field.name for field in fields(ServeConfig)}
    for place, text in of_builds:
        said = with_variable_names(text, BuildConfig)
        for flag in FLAG.findall(text):
            name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            if name in names - served:
                assert f"BEI_{name.upper()}" in said, place
        assert said.startswith(text.rstrip(".")), place


def test_switches_have_their_values() -> None:
    text = "lower --min-cosine, or --no-verify, or --allow-below-threshold, or --precision fp32."
    variables = "BEI_MIN_COSINE, BEI_VERIFY=false, BEI_ALLOW_BELOW_THRESHOLD=true"
    assert with_variable_names(text, BuildConfig) == f"{text} Flags of 'bei build' are variables here: {variables}."
    assert with_variable_names("build with --precision fp32.", BuildConfig) == "build with --precision fp32."


def test_an_error_keeps_its_class_and_fields() -> None:
    said = r"lower --min-cosine\. Flags .* BEI_MIN_COSINE\.$"
    with pytest.raises(VerificationError, match=said), variables_in_errors(BuildConfig):
        raise VerificationError("lower --min-cosine.")
    with pytest.raises(MissingDependencyError) as caught, variables_in_errors(BuildConfig):
        raise MissingDependencyError("torch", "cuda", "Building with --target cuda")
    assert caught.value.remedy == "pip install 'bei[cuda]'"
    with pytest.raises(BeiError, match=r"^as it is$"), variables_in_errors(BuildConfig):
        raise BeiError("as it is")
