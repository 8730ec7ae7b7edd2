"""The flags of ``bei embed``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import pytest

from bei.bulk.chunks import ChunkSize
from bei.bulk.run import JobOptions
from bei.cli.embed.arguments import SETTINGS, add_arguments, job_options
from bei.config.settings import ServeConfig
from bei.errors import ConfigError

_NEEDED = ("model", "--input", "in.parquet", "--output", "out")
# What the plan of a job has of the input and the model, and what changes no byte of the output: where and how fast.
_OF_CONTENTS = {"model", "input", "input_format", "shard_rows", "precision"}
_NOT_IN_THE_PLAN = {
    *("output", "shard", "ray", "ray_workers", "json", "metrics_file"),
    *("engine_threads", "engine_streams", "graph_megabytes", "gpu_megabytes", "tokenizer_threads", "hang_timeout"),
    *("cache_dir", "cache_max_size"),
    # These decide whether there is a job.
    *("require_signature", "untrained_dimensions"),
}
# Flags that the plan has among its options, each with what changes it.
_IN_THE_PLAN: Mapping[str, tuple[str, ...]] = {
    "task": ("--task", "sparse"),
    "output_format": ("--output-format", "npy"),
    "text_column": ("--text-column", "other"),
    "image_column": ("--image-column", "other"),
    "query_column": ("--task", "rerank", "--query-column", "other"),
    "id_column": ("--id-column", "id"),
    "columns": ("--columns", "a,b"),
    "max_rows": ("--max-rows", "5"),
    "on_error": ("--on-error", "null"),
    "adapter": ("--adapter", "one"),
    "prompt_name": ("--prompt-name", "query"),
    "input_type": ("--input-type", "query"),
    "prompt": ("--prompt", "x: "),
    "dimensions": ("--dimensions", "5"),
    "normalize": ("--no-normalize",),
    "output_dtype": ("--output-dtype", "int8"),
    "top_k": ("--task", "sparse", "--top-k", "5"),
    "raw_scores": ("--task", "classify", "--raw-scores"),
    "labels": ("--task", "extract", "--labels", "a"),
    "structures": ("--task", "extract", "--structures", "{}"),
    "relations": ("--task", "extract", "--relations", "a"),
    "classifications": ("--task", "extract", "--classifications", "[]"),
    "threshold": ("--task", "extract", "--threshold", "0.1"),
    "flat": ("--task", "extract", "--no-flat"),
    "multi_label": ("--task", "extract", "--multi-label"),
    "instruction": ("--task", "rerank", "--query-column", "q", "--instruction", "x"),
    "truncate": ("--truncate", "none"),
    "max_tokens": ("--max-tokens", "5"),
    "chunk_tokens": ("--chunk-tokens", "5"),
    "chunk_overlap": ("--chunk-tokens", "5", "--chunk-overlap", "2"),
    "auto_truncate": (),
}


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


def test_every_flag_and_setting_is_in_the_plan_or_changes_no_byte_of_the_output() -> None:
    """--auto-truncate was neither."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    assert flags | SETTINGS == _OF_CONTENTS | _NOT_IN_THE_PLAN | _IN_THE_PLAN.keys()

    def planned(*given: str, **settings: object) -> tuple[object, ...]:
        options = _options(*given)
        return options.task, options.columns, options.lasting(ServeConfig(**settings))  # type: ignore[arg-type]

    for name, given in _IN_THE_PLAN.items():
        if name == "auto_truncate":
            assert planned(auto_truncate=False) != planned()
        else:
            last = next(place for place in range(len(given)) if given[place].endswith(name.replace("_", "-")))
            assert planned(*given) != planned(*given[:last] if name != "query_column" else ()), name


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
