"""``bei run-batch``: OpenAI's batch lines, answered without a server."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.cli.console_text import shown_share
from bei.errors import ConfigError

if TYPE_CHECKING:
    from bei.config.settings import ServeConfig
    from bei.server.run_batch import FindArtifacts

# Settings of bei serve that mean something without clients.
SETTINGS = frozenset(
    (
        *(
            "models",
            "alias",
            "any_model_name",
            "engine_threads",
            "engine_streams",
            "graph_megabytes",
            "gpu_megabytes",
            "devices",
            "tune",
        ),
        *("tokenizer_threads", "hang_timeout", "cache_dir", "cache_max_size", "precision", "require_signature"),
        *("dialect", "auto_truncate", "untrained_dimensions", "openai_token_ids", "max_queue_tokens"),
        *("max_client_batch_size", "payload_limit", "answer_limit", "answer_memory"),
    )
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of files."""
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i",
        "--input-file",
        metavar="FILE.jsonl",
        required=True,
        help="requests, one a line: custom_id, method, url, body",
    )
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE.jsonl",
        required=True,
        help="answers; FILE.jsonl.progress says how far it is",
    )
    group.add_argument(
        "--errors", metavar="FILE.jsonl", help="errors, and lines that are no requests (default: OUTPUT.errors.jsonl)"
    )


def run_batch(options: dict[str, Any], config: ServeConfig, find_artifacts: FindArtifacts) -> int:
    """Answer all lines, and say what became of them. Returns the exit code."""
    from bei.server.run_batch import BatchFiles
    from bei.server.run_batch import run_batch as run

    if config.has_processes:
        raise ConfigError(
            "bei run-batch has one process and one device: leave http_workers out, and run it once for each device, "
            "with a part of the input each."
        )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    output = Path(options["output_file"])
    errors = Path(options["errors"] or output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl"))
    with shown_share("lines") as tell:
        end = run(BatchFiles(Path(options["input_file"]), output, errors), find_artifacts, config, tell)
    reached = end.reached
    if not reached.failed:
        with suppress(OSError):
            errors.unlink()
    failed = f", {reached.failed:,} of them errors in {errors}" if reached.failed else ""
    said = f"{reached.completed + reached.failed:,} lines are answered{failed}; {end.num_answered:,} in this run"
    if end.signal is not None:
        print(f"{said}. Stopped: the same command goes on.", file=sys.stderr)  # noqa: T201
        return 128 + end.signal
    print(f"{said}.", file=sys.stderr)  # noqa: T201
    return 1 if reached.failed else 0
