"""The flags of ``bei embed``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import pytest

from bei.bulk.chunks import ChunkSize
from bei.bulk.run import JobOptions
from bei.cli.embed.arguments import add_arguments, job_options
from bei.errors import ConfigError

_NEEDED = ("model", "--input", "in.parquet", "--output", "out")


def _options(*flags: str, environment: Mapping[str, str] = {}) -> JobOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return job_options(vars(parser.parse_args([*_NEEDED, *flags])), environment)


def _slurm(number: int, of: tuple[int, ...], step: int) -> Mapping[str, str]:
    """What Slurm tells the process ``number`` of an array."""
    values = {"ID": number, "COUNT": len(of), "MIN": of[0], "MAX": of[-1], "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def test_without_flags_dense_vectors_are_made_of_the_column_text() -> None:
    options = _options()
    assert (options.task, options.columns.text, options.task_options, options.part) == ("embed", "text", {}, (0, 1))


def test_flags_of_the_task_get_the_names_of_models_options() -> None:
    options = _options("--dimensions", "64", "--no-normalize", "--truncate", "left", "--chunk-tokens", "9")
    assert options.task_options == {
        "dimensions": 64,
        "normalize": False,
        "truncate": True,
        "truncation_direction": "left",
    }
    assert options.chunk_size == ChunkSize(9, 0)
    assert _options("--truncate", "none").task_options == {"truncate": False}


@pytest.mark.parametrize(
    ("flags", "environment", "part"),
    [
        (("--shard", "2/3"), {}, (2, 3)),
        (("--shard", "auto"), {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "4"}, (1, 4)),
        (
            ("--shard", "auto"),
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "2"},
            (0, 2),
        ),
        (("--shard", "auto"), _slurm(4, of=(0, 2, 4, 6), step=2), (2, 4)),
        ((), {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "4"}, (0, 1)),
    ],
)
def test_parts_come_from_the_flag_or_where_it_says_so_from_the_environment(
    flags: tuple[str, ...], environment: Mapping[str, str], part: tuple[int, int]
) -> None:
    assert _options(*flags, environment=environment).part == part


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (("--shard", "3/3"), {}, "--shard"),
        (("--shard", "9" * 30), {}, "--shard"),
        (("--shard", "auto"), {}, "JOB_COMPLETION_INDEX"),
        (("--shard", "auto"), {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "4"}, "JOB_COMPLETION_INDEX"),
        (("--shard", "auto"), _slurm(3, of=(1, 3, 7), step=1), "equally far apart"),
        (("--input", ""), {}, "--input and --output"),
        (("--output", ""), {}, "--input and --output"),
        (("--chunk-overlap", "2"), {}, "--chunk-tokens"),
        (("--task", "sparse", "--dimensions", "8"), {}, "--dimensions is for --task embed"),
        (("--task", "extract", "--max-tokens", "5"), {}, "--max-tokens is for"),
        (("--top-k", "8"), {}, "--top-k is for --task sparse"),
        (("--task", "rerank"), {}, "--query-column"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(
    flags: tuple[str, ...], environment: Mapping[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        _options(*flags, environment=environment)


@pytest.mark.parametrize("wrong", ["{", "null", '[{"a": ' + "[" * 100_000, '"\udcff"'])
@pytest.mark.parametrize("flag", ["--structures", "--classifications"])
def test_a_flag_that_is_no_json_is_refused(flag: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Deep nesting was a RecursionError."""
    with pytest.raises(SystemExit):
        _options("--task", "extract", flag, wrong)
    assert f"argument {flag}: no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--labels", '{"name": "a", "name": "b"}'),
        ("--relations", '{"eats": {"threshold": 0.1, "threshold": 0.2}}'),
        ("--structures", '{"cat": ["name"], "cat": ["age"]}'),
        ("--classifications", '[{"task": "a", "labels": {"b": "c", "b": "d"}}]'),
    ],
)
def test_a_key_that_stands_twice_in_a_flag_is_refused(
    flag: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one was dropped."""
    with pytest.raises(SystemExit):
        _options("--task", "extract", flag, given)
    assert f"argument {flag}: an object has the key '" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--labels", "--relations"])
def test_names_are_a_list_in_json_or_separated_by_commas(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a list in JSON, the names had its brackets and quotes."""
    name = flag.strip("-")
    for given, expected in (('["a, b", "c"]', ["a, b", "c"]), ("a , b", ["a", "b"])):
        assert _options("--task", "extract", flag, given).task_options == {name: expected}
    with pytest.raises(SystemExit):
        _options("--task", "extract", flag, "[a, b]")
    assert f"argument {flag}: no JSON list of names" in capsys.readouterr().err


def test_classifications_are_a_list_in_json() -> None:
    given = '[{"task": "mood", "labels": ["good", "bad"]}]'
    options = _options("--task", "extract", "--classifications", given)
    assert options.task_options == {"classifications": [{"task": "mood", "labels": ["good", "bad"]}]}
