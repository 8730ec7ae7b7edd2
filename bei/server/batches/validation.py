"""What is wrong with the input of a batch, before any of it is run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bei.server.batches.lines import read_lines
from bei.server.batches.records import BatchProblem
from bei.server.batches.unique_ids import UniqueIds, digest_of

# Problems that a batch names.
_MOST_PROBLEMS = 20


class Validated(NamedTuple):
    """The number of lines that are requests, and the first problems; with any the batch is not run."""

    num_lines: int
    problems: list[BatchProblem]


def validated(path: Path, endpoint: str, most_lines: int, most_body_bytes: int) -> Validated:
    """Read the input to its end, or to the first problems that are enough."""
    problems: list[BatchProblem] = []
    num_lines = 0
    with path.open("rb") as file, UniqueIds(path.parent) as ids:
        for line in read_lines(file, most_body_bytes):
            num_lines += 1
            if num_lines > most_lines:
                message = f"The file has more than {most_lines} lines (batch_line_limit): make several batches of it."
                return Validated(0, [_problem("too_many_lines", message)])
            if line.problem is not None:
                problems.append(_problem(line.problem.code, line.problem.message, line.number))
            elif line.url != endpoint:
                message = f"The url is {line.url!r}, and the endpoint of the batch {endpoint!r}: one must be the other."
                problems.append(_problem("mismatched_endpoint", message, line.number, "url"))
            else:
                assert line.custom_id is not None, "it is a request"
                ids.add(line.custom_id)
            if len(problems) >= _MOST_PROBLEMS:
                return Validated(0, problems)
        repeated = ids.repeated()
        if repeated:
            seen: set[str] = set()
            for line in read_lines(file, most_body_bytes):
                if line.custom_id is None or digest_of(line.custom_id) not in repeated:
                    continue
                if line.custom_id in seen and len(problems) < _MOST_PROBLEMS:
                    message = f"An earlier line has the custom_id {line.custom_id!r} too: rename one."
                    problems.append(_problem("duplicate_custom_id", message, line.number, "custom_id"))
                seen.add(line.custom_id)
    if not num_lines:
        problems = [_problem("empty_file", "The file has no lines: upload one with a request a line.")]
    return Validated(num_lines, problems)


def _problem(code: str, message: str, line: int | None = None, param: str | None = None) -> BatchProblem:
    return {"code": code, "message": message, "param": param, "line": line}
