"""The flags of ``bei embed``, and the job that they describe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bei.bulk.chunks import ChunkSize
from bei.bulk.input_check import FLAGS_OF_TEXTS
from bei.bulk.output_formats import FORMATS
from bei.bulk.row_task import TASKS
from bei.bulk.run import JobOptions
from bei.bulk.sources.rows import Columns
from bei.bulk.sources.source import FORMATS as INPUT_FORMATS
from bei.errors import ConfigError
from bei.utils.json_keys import key_twice
from bei.utils.ranges import shown, whole

# Settings of bei serve that a job shares.
SETTINGS = frozenset(
    (
        *("engine_threads", "engine_streams", "graph_megabytes", "gpu_megabytes", "tokenizer_threads", "auto_truncate"),
        *("cache_dir", "cache_max_size", "precision", "require_signature", "untrained_dimensions", "hang_timeout"),
    )
)
T = TypeVar("T")

_DTYPES = ("float", "float16", "int8", "uint8", "binary", "ubinary")
# Variables in which Kubernetes' Indexed Jobs and Slurm's arrays number their processes: a process's number, how many
# there are, the first number, the last one, and the step between two.
_NUMBERED = (
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "", "", ""),
    ("SLURM_ARRAY_TASK_ID", *(f"SLURM_ARRAY_TASK_{name}" for name in ("COUNT", "MIN", "MAX", "STEP"))),
)
_FROM_ENVIRONMENT = "auto"

# The options of each task, by the names of bei.Model's.
_VECTORS = ("prompt_name", "input_type", "prompt", "truncate", "truncation_direction", "truncate_prompt_tokens")
_SCORES = ("truncate", "truncation_direction", "truncate_prompt_tokens", "raw_scores")
_OPTIONS_OF: Mapping[str, tuple[str, ...]] = {
    "embed": (*_VECTORS, "dimensions", "normalize", "output_dtype"),
    "sparse": (*_VECTORS, "top_k"),
    "tokens": _VECTORS,
    "classify": _SCORES,
    "rerank": (*_SCORES, "instruction"),
    "extract": ("labels", "structures", "relations", "classifications", "threshold", "flat", "multi_label"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Options of tasks that are not given are None, so that those of other tasks can be refused."""
    parser.add_argument("model", help="an artifact or a checkpoint, as for bei serve")
    where = parser.add_argument_group("input and output")
    where.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILES",
        help="files, folders or patterns, also s3://, gs://, hf:// and others of fsspec; - is standard input",
    )
    where.add_argument("--output", required=True, metavar="FOLDER", help="an empty folder, or that of the same job")
    where.add_argument(
        "--input-format", choices=tuple(INPUT_FORMATS), help="default: by the endings (.gz, .zst, ... are unpacked)"
    )
    where.add_argument("--output-format", choices=tuple(FORMATS), default="parquet", help="default: parquet")
    where.add_argument("--text-column", metavar="NAME", default="text", help="what the model reads (default: text)")
    where.add_argument(
        "--image-column",
        metavar="NAME",
        help="images (bytes, data URLs, whole paths, lists of these) that are one input with the text, for embed, or "
        "alone where --text-column names it too",
    )
    where.add_argument("--query-column", metavar="NAME", help="the query of each pair, for --task rerank")
    where.add_argument("--id-column", metavar="NAME", help="each row's id (default: a column row, the row's number)")
    where.add_argument("--columns", metavar="NAME,NAME", default="", help="other columns to copy to the output")
    where.add_argument("--max-rows", type=whole(1, 10**12), metavar="N", help="only the first rows, for a trial")
    where.add_argument(
        "--on-error",
        choices=("skip", "null", "fail"),
        default="skip",
        help="rows without an answer, which FOLDER/_dead lists: left out (default), null, or the end of the job",
    )
    _add_options(parser.add_argument_group("the task"))
    process = parser.add_argument_group("several processes, progress")
    process.add_argument(
        "--shard",
        metavar="I/N",
        help="work on the I-th of N parts, I from 0; auto: as Kubernetes' Indexed Job (with JOB_COMPLETIONS set) or "
        "Slurm's array says",
    )
    process.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="a Ray cluster that works on the shards: auto, local, or HOST:PORT (extra: scale)",
    )
    process.add_argument(
        "--ray-workers", type=whole(1, 10_000), metavar="N", help="engines on it (default: one a GPU, or one a node)"
    )
    process.add_argument("--shard-rows", type=whole(1, 10**7), metavar="N", help="rows of a file (default: some 64 MB)")
    process.add_argument(
        "--json", action="store_true", help="progress and result on standard output, a JSON object a line"
    )
    process.add_argument(
        "--metrics-file", type=Path, metavar="FILE.prom", help="progress for Prometheus' textfile collector"
    )


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--task", choices=tuple(TASKS), default="embed", help="default: embed (dense vectors)")
    group.add_argument("--adapter", metavar="NAME", help="one of the artifact's adapters, which reads all rows")
    group.add_argument("--prompt-name", metavar="NAME", help="one of the model's prompts")
    group.add_argument("--input-type", metavar="NAME", help="query, document, or the name of a prompt")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself, in front of texts or around {text}")
    group.add_argument(
        "--dimensions", type=whole(1, 10**6), metavar="N", help="cut dense vectors to so many components"
    )
    group.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="default: as the checkpoint says")
    group.add_argument("--output-dtype", choices=_DTYPES, help="numbers of dense vectors (default: float)")
    group.add_argument("--top-k", type=whole(1, 10**6), metavar="N", help="keep the largest weights of sparse vectors")
    group.add_argument("--raw-scores", action="store_true", default=None, help="logits instead of probabilities")
    group.add_argument("--labels", type=_labels, metavar="A,B", help=_LABELS_HELP)
    group.add_argument(
        "--structures", type=_object, metavar="JSON", help="records that --task extract finds (GLiNER2, 2.5)"
    )
    group.add_argument(
        "--relations", type=_labels, metavar="A,B", help="relations that --task extract finds (GLiNER2, 2.5)"
    )
    group.add_argument(
        "--classifications", type=_list, metavar="JSON", help="what --task extract classifies by (GLiNER2, 2.5)"
    )
    group.add_argument("--threshold", type=float, metavar="X", help="spans score above it (default: 0.5)")
    group.add_argument("--flat", action=argparse.BooleanOptionalAction, help="spans do not overlap (default)")
    group.add_argument("--multi-label", action="store_true", default=None, help="a span may have several labels")
    group.add_argument("--instruction", metavar="TEXT", help="for rerankers whose template has a slot for one")
    group.add_argument(
        "--truncate",
        choices=("none", "left", "right"),
        help="the side that is cut off too long texts; none: they have no answer (default: as the model says)",
    )
    group.add_argument("--max-tokens", type=whole(1, 10**7), metavar="N", help="cut texts to so many tokens")
    group.add_argument(
        "--chunk-tokens", type=whole(1, 10**6), metavar="N", help="a vector for each chunk of so many tokens of a text"
    )
    group.add_argument(
        "--chunk-overlap", type=whole(0, 10**6), metavar="N", help="tokens that a chunk shares with the one before"
    )


_LABELS_HELP = "what --task extract finds, separated by commas, or JSON: [name], {name: description} (GLiNER2, 2.5)"


def _labels(given: str) -> list[str] | dict[str, object]:
    if given.lstrip().startswith("["):
        return _decoded(given, _decode_names, "list of names")
    return _object(given) if given.lstrip().startswith("{") else [label.strip() for label in given.split(",")]


_decode_names = msgspec.json.Decoder(list[str]).decode
_decode_object = msgspec.json.Decoder(dict[str, object]).decode
_decode_list = msgspec.json.Decoder(list[dict[str, object]]).decode


def _object(given: str) -> dict[str, object]:
    return _decoded(given, _decode_object, "object")


def _list(given: str) -> list[dict[str, object]]:
    return _decoded(given, _decode_list, "list of objects")


def _decoded(given: str, decode: Callable[[str], T], what: str) -> T:
    try:
        found, twice = decode(given), key_twice(given)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"no JSON {what}: {error}") from error
    if twice is not None:
        raise argparse.ArgumentTypeError(f"an object has the key {shown(twice)} twice: give each once")
    return found


def job_options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> JobOptions:
    """The job of parsed flags. Raises ConfigError."""
    columns = Columns(
        given["text_column"],
        given["query_column"],
        given["id_column"],
        tuple(name.strip() for name in given["columns"].split(",") if name.strip()),
        given["image_column"],
    )
    chunk_size = None
    if given["chunk_tokens"] is not None:
        chunk_size = ChunkSize(given["chunk_tokens"], given["chunk_overlap"] or 0)
    elif given["chunk_overlap"] is not None:
        raise ConfigError("--chunk-overlap is for --chunk-tokens, which is missing: give both, or leave it out.")
    options = JobOptions(
        inputs=tuple(given["input"]),
        output=given["output"],
        task=given["task"],
        columns=columns,
        input_format=given["input_format"],
        output_format=given["output_format"],
        task_options=_task_options(given),
        chunk_size=chunk_size,
        on_error=given["on_error"],
        part=_part(given["shard"], environment),
        shard_rows=given["shard_rows"],
        max_rows=given["max_rows"],
        adapter=given["adapter"],
    )
    options.check()
    return options


def _task_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the task that were given. Raises ConfigError for one that another task has."""
    cut = given["truncate"]
    asked = {name: given[name] for name in given if any(name in names for names in _OPTIONS_OF.values())}
    asked |= {
        "truncate": None if cut is None else cut != "none",
        "truncation_direction": cut if cut in ("left", "right") else None,
        "truncate_prompt_tokens": given["max_tokens"],
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    for name in asked:
        if name not in _OPTIONS_OF[given["task"]]:
            able = ", ".join(task for task, names in _OPTIONS_OF.items() if name in names)
            flag = FLAGS_OF_TEXTS.get(name) or f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for --task {able}, not for {given['task']}: leave it out.")
    return asked


def _part(text: str | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """Which part of how many. Raises ConfigError."""
    if text is None:
        return 0, 1
    if text == _FROM_ENVIRONMENT:
        return _part_of_environment(environment)
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and len(text) < 20 and int(index) < int(count)):
        raise ConfigError(f"--shard must be auto, or I/N with I from 0 to below N, as 0/4, not {shown(text)}.")
    return int(index), int(count)


def _part_of_environment(environment: Mapping[str, str]) -> tuple[int, int]:
    for index, count, least, most, step in _NUMBERED:
        values = [environment.get(name, "") for name in (index, count)]
        first, apart = environment.get(least, "0"), environment.get(step, "1")
        if all(value.isdecimal() and len(value) < 10 for value in (*values, first, apart)) and int(apart):
            number, total = int(values[0]) - int(first), int(values[1])
            # A list of numbers with gaps (--array=1,3,7) is no numbering.
            last = environment.get(most, str(int(first) + int(apart) * (total - 1)))
            is_even = last == str(int(first) + int(apart) * (total - 1)) and number % int(apart) == 0
            if is_even and 0 <= number // int(apart) < total:
                return number // int(apart), total
    named = " or ".join(f"{index} and {count}" for index, count, *_ in _NUMBERED)
    raise ConfigError(
        f"--shard auto needs the variables {named}, of numbers that are equally far apart: set both, or give I/N."
    )
