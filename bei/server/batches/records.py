"""Files and batches as they are kept, the states of a batch, and how clients see both."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict
from uuid import uuid4

import msgspec

from bei.errors import ConflictError
from bei.server.batches.answer_files import Checkpoint

Purpose: TypeAlias = Literal["batch", "batch_output"]

Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]

# From each state to those that may follow. A batch that is past its time has its last errors written while it is
# finalizing, one that is cancelled while it is cancelling.
_NEXT: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "failed", "cancelling"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled", "failed"),
    "completed": (),
    "failed": (),
    "expired": (),
    "cancelled": (),
}


class FileRecord(msgspec.Struct):
    """``owner``: the name of an API key; empty where the server asks for none. ``num_bytes`` of one that is not
    ``is_ready`` are those that it may come to have."""

    id: str
    owner: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int
    is_ready: bool = False


class BatchProblem(TypedDict):
    """Why a batch has failed. ``line``: of its input."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchRecord(msgspec.Struct):
    """``moved_s``: when it came into each state. ``output_id`` and ``error_id`` are files that clients see once it is
    finished, if they are not empty. ``output_lifetime_s``: of both. ``expires_s``: of its completion window.
    ``is_late``: that has ended before all lines were answered. ``total`` 0: it is not validated."""

    id: str
    owner: str
    endpoint: str
    input_id: str
    window: str
    expires_s: int
    output_lifetime_s: int
    metadata: dict[str, str] | None
    status: Status
    moved_s: dict[Status, int]
    output_id: str
    error_id: str
    problems: list[BatchProblem] = []
    total: int = 0
    is_late: bool = False
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        if not {"validating", self.status} <= self.moved_s.keys():
            raise ValueError(f"it is {self.status}, and does not say since when")

    @property
    def is_open(self) -> bool:
        """False once it has reached its last state."""
        return bool(_NEXT[self.status])

    @property
    def finished_s(self) -> int:
        """When it came into its state."""
        return self.moved_s[self.status]

    def move(self, status: Status, now_s: int) -> None:
        """Into another state. Raises ConflictError if that cannot follow."""
        if status not in _NEXT[self.status]:
            raise ConflictError(f"The batch {self.id} is {self.status}: it cannot become {status}.")
        self.status = status
        self.moved_s[status] = now_s

    def fail(self, problems: list[BatchProblem], now_s: int) -> None:
        """For good: what was answered is dropped."""
        self.move("failed", now_s)
        self.problems = problems
        self.checkpoint = Checkpoint()


class FileObject(TypedDict):
    """A file, as OpenAI describes it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    """A page of files, the newest first unless the query says otherwise."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """It is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchProblems(TypedDict):
    """Why a batch has failed."""

    object: Literal["list"]
    data: list[BatchProblem]


class LineCounts(TypedDict):
    """Lines of a batch. ``failed``: those with an error."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """A batch, as OpenAI describes it. Times are seconds since the epoch; null: it was not in that state."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: LineCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def new_id(kind: Literal["file-", "batch_"]) -> str:
    """One that nobody can guess."""
    return kind + uuid4().hex


def file_object(record: FileRecord) -> FileObject:
    """``record`` for clients."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


def batch_object(record: BatchRecord) -> BatchObject:
    """``record`` for clients."""
    at, checkpoint = record.moved_s, record.checkpoint
    is_done = not record.is_open and record.status != "failed"
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": record.problems} if record.problems else None,
        "input_file_id": record.input_id,
        "completion_window": record.window,
        "status": record.status,
        "output_file_id": record.output_id if is_done and checkpoint.output_bytes else None,
        "error_file_id": record.error_id if is_done and checkpoint.error_bytes else None,
        "created_at": at["validating"],
        "in_progress_at": at.get("in_progress"),
        "expires_at": record.expires_s,
        "finalizing_at": at.get("finalizing"),
        "completed_at": at.get("completed"),
        "failed_at": at.get("failed"),
        "expired_at": at.get("expired"),
        "cancelling_at": at.get("cancelling"),
        "cancelled_at": at.get("cancelled"),
        "request_counts": {
            "total": record.total,
            "completed": checkpoint.completed,
            "failed": checkpoint.failed,
        },
        "metadata": record.metadata,
    }
