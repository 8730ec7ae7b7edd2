"""The files of ``bei run-batch``: an input that is looked at first, and an output that goes on where it ended.

Beside the output stands ``OUTPUT.progress``: the checkpoint, the digest of the input that it counts lines of, and what
has answered them. It stays when all is done, so that a command that is run once more finds nothing left to do.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from bei.errors import JobDiffersError, JobError, JobInputError
from bei.server.batches.answer_files import AnswerFiles, Checkpoint
from bei.server.batches.lines import read_lines
from bei.server.batches.unique_ids import UniqueIds, digest_of
from bei.utils.differences import differences
from bei.utils.durable_files import sync_folder, write_durably
from bei.utils.file_lock import try_acquire
from bei.utils.named_files import open_named
from bei.utils.ranges import TERABYTE
from bei.utils.untrusted_files import UnfitError, check_regular, read_bounded

_MOST_PROGRESS_BYTES = 1_000_000
# Ids that the error of an input names.
_SHOWN = 5


class AnsweredBy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What answers depend on: the digests of the models by their names, in their order, and ``settings``."""

    models: list[tuple[str, str]]
    settings: dict[str, Any]

    def differences(self, now: AnsweredBy) -> Iterator[str]:
        """What differs in ``now``, in words."""
        given, others = ([name for name, _ in one.models] for one in (self, now))
        if given != others:
            yield from differences({"models": given}, {"models": others}, "the list of {}".format)
        else:
            yield from differences(dict(self.models), dict(now.models), "the artifact of {}".format)
        yield from differences(self.settings, now.settings)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``OUTPUT.progress`` holds. ``size`` and ``digest``: of the input when it was looked at last. ``served``:
    None where nothing was answered yet, or by an earlier version of bei."""

    size: int
    digest: str
    checkpoint: Checkpoint
    served: AnsweredBy | None = None


class Seen(NamedTuple):
    """An input that was read to its end once. ``former_digest``: of its first bytes, as many as were asked for."""

    size: int
    digest: str
    former_digest: str
    num_lines: int


class ResumableRun(NamedTuple):
    """An input of ``num_lines`` lines, open for reading, and the files of its answers. ``begin``: once before there are
    further ones; raises JobDiffersError where something else has given the former ones."""

    input: BinaryIO
    num_lines: int
    files: AnswerFiles
    begin: Callable[[AnsweredBy], None]


@contextmanager
def resumable_run(source: Path, output: Path, errors: Path, most_body_bytes: int) -> Iterator[ResumableRun]:
    """The files of a run, which no other process writes meanwhile.

    Raises ConfigError where ``source`` cannot be read, JobInputError where it has a ``custom_id`` twice,
    JobDiffersError where the files are of another input, JobError where they cannot be used; DiskFullError, OSError.
    """
    if len({path.resolve() for path in (source, output, errors)}) < 3:
        raise JobError(f"{source}, {output} and {errors} must be three files: give each its own name.")
    for path in (output, errors):
        _check_writable(path)
    progress_path = output.with_name(f"{output.name}.progress")
    with ExitStack() as stack:
        file = stack.enter_context(open_named("The input", source, TERABYTE))
        stack.enter_context(_locked(progress_path.with_name(f".{progress_path.name}.lock"), output))
        former = _former(progress_path, output, errors)
        served = former.served
        seen = _look_at(file, source, output.parent, most_body_bytes, former.size)
        if seen.former_digest != former.digest:
            raise JobDiffersError(
                f"{output} has answers of another input than {source}: {_anew(errors, progress_path)}"
            )

        def save(checkpoint: Checkpoint) -> None:
            write_durably(progress_path, msgspec.json.encode(Progress(seen.size, seen.digest, checkpoint, served)))

        def begin(now: AnsweredBy) -> None:
            nonlocal served
            if former.checkpoint.num_lines:
                _check_served(former.served, now, f"{output} has answers", _anew(errors, progress_path))
            served = now
            save(former.checkpoint)

        save(former.checkpoint)
        try:
            files = AnswerFiles(output, errors, former.checkpoint, save)
        except ValueError as error:
            raise JobDiffersError(
                f"{error}: bring it back, or remove it with {progress_path} to begin anew."
            ) from error
        sync_folder(output.parent)
        yield ResumableRun(file, seen.num_lines, stack.enter_context(files), begin)


def _anew(errors: Path, progress: Path) -> str:
    return f"remove it with {errors} and {progress} to begin anew, or choose another output."


def _check_served(former: AnsweredBy | None, now: AnsweredBy, what: str, anew: str) -> None:
    """Raise JobDiffersError, which begins with ``what`` and ends with ``anew``, unless both are the same."""
    if former is None:
        raise JobDiffersError(
            f"{what} of an earlier version of bei, which kept no record of the model and the settings: end the run "
            f"with that version, or {anew}"
        )
    if found := "; ".join(former.differences(now)):
        raise JobDiffersError(f"{what} that were given otherwise: {found}. Give the same again, or {anew}")


def _check_writable(path: Path) -> None:
    try:
        check_regular(path)
    except UnfitError as error:
        raise JobError(f"{path} cannot be written: {error}. Give a file, which a later run can go on with.") from None


@contextmanager
def _locked(path: Path, output: Path) -> Iterator[None]:
    """The only process that writes ``output``."""
    lock = try_acquire(path)
    if lock is None:
        raise JobError(f"Another process writes {output}: wait for it, or choose another output.")
    with lock:
        yield
        path.unlink(missing_ok=True)


def _former(path: Path, output: Path, errors: Path) -> Progress:
    """What an earlier run has left; of a first run, the beginning."""
    try:
        found = _decoder.decode(read_bounded(path, _MOST_PROGRESS_BYTES))
    except FileNotFoundError:
        taken = next((one for one in (output, errors) if one.exists() and one.stat().st_size), None)
        if taken is not None:
            raise JobDiffersError(
                f"{taken} is there already, and no {path} that says how far it is: remove it, or choose another name."
            ) from None
        return Progress(0, hashlib.blake2b().hexdigest(), Checkpoint())
    except (UnfitError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobDiffersError(f"{path} is not what a run has left ({error}): remove it with {output}.") from error
    return found


def _look_at(file: BinaryIO, source: Path, scratch: Path, most_body_bytes: int, former_size: int) -> Seen:
    """Read the whole input once: its digests, its number of lines, and whether it has an id twice.

    Raises JobInputError.
    """
    hashed = _Hashed(file, former_size)
    num_lines = 0
    with UniqueIds(scratch) as ids:
        for line in read_lines(hashed, most_body_bytes):  # type: ignore[arg-type]  # it has what is called
            num_lines += 1
            if line.custom_id is not None:
                ids.add(line.custom_id)
        repeated = ids.repeated()
    if repeated:
        raise _twice(file, source, most_body_bytes, repeated)
    return Seen(hashed.size, hashed.digest, hashed.former_digest, num_lines)


def _twice(file: BinaryIO, source: Path, most_body_bytes: int, repeated: set[bytes]) -> JobInputError:
    places: dict[str, list[int]] = {}
    for line in read_lines(file, most_body_bytes):
        if line.custom_id is not None and digest_of(line.custom_id) in repeated:
            places.setdefault(line.custom_id, []).append(line.number)
    shown = "; ".join(
        f"{name!r} in lines {numbers[0]} and {numbers[1]}" for name, numbers in [*places.items()][:_SHOWN]
    )
    return JobInputError(f"{source} has a custom_id twice, and each must have its own answer: {shown}. Rename them.")


class _Hashed:
    """Reads ``file`` from its beginning, and hashes what is read; once more when it is at ``former_size``."""

    def __init__(self, file: BinaryIO, former_size: int) -> None:
        self._file = file
        self._hash = hashlib.blake2b()
        self._left = former_size
        self.size = 0
        self.former_digest = "" if former_size else self._hash.hexdigest()

    @property
    def digest(self) -> str:
        """Of all that was read."""
        return self._hash.hexdigest()

    def seek(self, place: int) -> int:
        """To the beginning."""
        return self._file.seek(place, io.SEEK_SET)

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(limit)
        self.size += len(line)
        if 0 < self._left <= len(line):
            before = self._hash.copy()
            before.update(line[: self._left])
            self.former_digest = before.hexdigest()
        self._left -= len(line)
        self._hash.update(line)
        return line


_decoder = msgspec.json.Decoder(Progress)
