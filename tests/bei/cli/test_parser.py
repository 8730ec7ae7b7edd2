"""What the command line does not know, refused in one line that says what may be meant; help; completion."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bei.cli import main
from bei.cli.help_texts import BUILD_GROUPS, EXAMPLES, METAVARS, SERVE_GROUPS
from bei.cli.parser import Parser, add_fields
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei_build.config import BuildConfig

COMMANDS = (
    "build",
    "sign",
    "serve",
    "tune",
    "verify",
    "calibrate",
    "inspect",
    "cache",
    "doctor",
    "simulate",
    "bench",
    "completion",
)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        main._parser(arguments[0], arguments).parse_args(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "no command 'srve': did you mean serve? See 'bei --help'."),
        (["nothing"], "no command 'nothing': build, sign, serve"),
        (["--vresion"], "no flag --vresion: did you mean --version? See 'bei --help'."),
        (["serve", "--prot", "1"], "no flag --prot: did you mean --port? See 'bei serve --help'."),
        (["serve", "model", "--no-iu"], "no flag --no-iu: did you mean --no-ui? See"),
        (["serve", "--zzz"], "no flag --zzz. See 'bei serve --help'."),
        (["serve", "--max-header", "1"], "no flag --max-header: did you mean --max-headers?"),
        (["serve", "--port", "x"], "--port: must be a whole number, not 'x'. See"),
        (["serve", "--bulk-share=x"], "--bulk-share: must be a number, not 'x'. See"),
        (["serve", "--port"], "--port: expected one argument. See"),
        (["serve", "--tune", "of"], "--tune: must be auto, off or force, not 'of': did you mean off? See"),
        (["serve", "--pooling", "cls"], "--pooling is a flag of 'bei build'; for what is built here set BEI_POOLING."),
        (["build", "x", "--port", "1"], "--port is a flag of 'bei serve'. See 'bei build --help'."),
        (["tune", "--port", "1"], "--port is a flag of 'bei serve'. See 'bei tune --help'."),
        (["build", "x", "--dtype", "fp32"], "--dtype fp32: use --precision fp32. See 'bei build --help'."),
        (["serve", "x", "--dtype=half"], "--dtype half: use --precision fp16. See 'bei serve --help'."),
        (["serve", "x", "--dtype", "int3"], "--dtype: use --precision. See 'bei serve --help'."),
        (
            ["build", "--model", "x"],
            "--model: use the first argument: a hub id, a folder or an installed package; to s",
        ),
        (["serve", "x", "--auto-truncate=false"], "--auto-truncate takes no value: use --no-auto-truncate. See"),
        (["serve", "--auto-truncate", "True", "x"], "--auto-truncate takes no value: use --auto-truncate. See"),
        (["serve", "x", "--no-auto-truncate", "0"], "--no-auto-truncate takes no value: use --auto-truncate. See"),
        (["build", "x", "--normalize", "no"], "--normalize takes no value: use --no-normalize. See"),
        (["help"], "no command 'help': use --help. See 'bei --help'."),
        (["version"], "no command 'version': use --version. See"),
        (["inspect"], "the following arguments are required: artifact. See 'bei inspect --help'."),
        (["inspect", "a", "b"], "unexpected argument 'b'. See 'bei inspect --help'."),
        (["cache", "lst"], "no command 'lst': did you mean list? See 'bei cache --help'."),
        (["cache", "list", "--jsn"], "no flag --jsn: did you mean --json? See 'bei cache list --help'."),
        (["simulate", "--devises", "2"], "no flag --devises: did you mean --devices? See"),
        (["bench", "u", "--concurency", "2"], "no flag --concurency: did you mean --concurrency? See"),
        (["doctor", "--jso"], "no flag --jso: did you mean --json? See"),
    ],
)
def test_what_is_wrong_is_named_with_what_may_be_meant(arguments: list[str], words: str) -> None:
    assert refusal(*arguments).startswith(words)


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for child in action.choices.values() for one in parsers(child)]
    return found


def whole() -> argparse.ArgumentParser:
    return main._parser(None, ("bench",), COMMANDS)


def test_no_parser_takes_abbreviations() -> None:
    found = parsers(whole())
    assert len(found) >= len(COMMANDS) + 3, "those of bei cache too"
    for parser in found:
        assert isinstance(parser, Parser)
        assert not parser.allow_abbrev
    assert refusal("serve", "--max-conn", "1").startswith("no flag --max-conn: did you mean --max-connections?")


@pytest.mark.parametrize("arguments", [[], ["cache"]])
def test_without_a_command_there_is_help_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(" ".join(["usage: bei", *arguments]))
    assert "examples:" in said.err
    assert said.out == ""


@pytest.mark.parametrize(("groups", "config"), [(SERVE_GROUPS, ServeConfig), (BUILD_GROUPS, BuildConfig)])
def test_every_flag_is_in_one_group_of_the_help(groups: dict[str, list[str]], config: type[Any]) -> None:
    grouped = sorted(name for names in groups.values() for name in names)
    fields = [field for field in dataclasses.fields(config) if not field.metadata.get("file_only")]
    assert grouped == sorted(field.name for field in fields if not field.metadata.get("positional"))


def test_every_form_of_a_value_is_a_setting_s() -> None:
    assert METAVARS.keys() <= {
        field.name for config in (ServeConfig, BuildConfig) for field in dataclasses.fields(config)
    }


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = f"bei {command}".strip()
    (parser,) = [one for one in parsers(whole()) if one.prog == name]
    for line in parser.format_help().splitlines():
        assert len(line) <= 80, line


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in EXAMPLES.items()])
def test_examples_can_be_parsed(text: str) -> None:
    """Explanations stand after several spaces."""
    examples = [
        re.split(" {2}| > ", line.strip())[0].split() for line in text.splitlines() if line.startswith("  bei ")
    ]
    assert examples or "COMMAND" in text
    for _, *words in examples:
        main._parser(words[0], words).parse_args(words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_choices(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="pip install 'bei[completion]'")
    main.main(["completion", shell])
    script = capsys.readouterr().out
    assert all(words in script for words in ("serve", "--max-queue-tokens", "tensorrt-rtx", "--concurrency"))


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="pip install 'bei[completion]'")
    main.main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def completed(*words: str) -> set[str]:
        asked = f"COMP_WORDS=(bei {' '.join(words)}); COMP_CWORD={len(words)}; _shtab_bei; echo ${{COMPREPLY[@]}}"
        command = ["bash", "-c", f"shopt -s extglob; source {tmp_path / 'script'}; {asked}"]
        return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())

    assert completed("ser") == {"serve"}
    assert completed("serve", "--tls-c") == {"--tls-cert", "--tls-client-ca"}
    assert completed("serve", "--tune", "") == {"auto", "off", "force"}


def test_whoever_has_read_enough_of_the_output_gets_no_error() -> None:
    """bei serve --help | head -1"""
    command = f"{sys.executable} -m bei serve --help | head -1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "COLUMNS": "20"})
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[0].startswith("usage: bei serve")


def test_completion_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        main.main(["completion", "bash"])
    assert "pip install 'bei[completion]'" in capsys.readouterr().err


def test_a_flag_of_a_list_that_is_given_twice_has_both_values() -> None:
    parser = Parser()
    add_fields(parser, ServeConfig, {})
    found = parser.parse_args(["--alias", "a", "--alias", "b=c,d=c", "--cors-origins", "https://a.example"])
    config = load(ServeConfig, {name: value for name, value in vars(found).items() if name != "config"}, env={})
    assert (config.alias, config.cors_origins) == (("a", "b=c", "d=c"), ("https://a.example",))
    assert load(ServeConfig, {}, env={"BEI_ALIAS": "a, b=c"}).alias == ("a", "b=c")
