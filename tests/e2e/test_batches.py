"""Files and batches of a real server: OpenAI's own client, a process that is killed in the middle, and a drain."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.support.artifacts import save_artifact

ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """Servers that come and go over one folder of batches."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, env
        self._artifact = save_artifact(folder / "fake").path
        self.folder = folder / "batches"

    @property
    def num_bytes(self) -> int:
        """Of all contents."""
        return sum(path.stat().st_size for path in (self.folder / "files").iterdir())

    def have_grown(self, before: int) -> bool:
        """True once there are more bytes of answers, by two writes or more."""
        return self.num_bytes > before + 20_000

    @contextmanager
    def serve(self, *flags: str, **variables: str) -> Iterator[Server]:
        """``bei serve`` with a slow engine."""
        command = [sys.executable, "-m", "tests.e2e.batch_process", "serve", self._artifact, "--port", "0"]
        with Server(
            [*command, "--batch-dir", self.folder, *flags],
            {**self._env, "BEI_TOKENIZER_THREADS": "1", **variables},
            self._folder,
        ) as server:
            yield server


@pytest.fixture
def batches(tmp_path: Path, env: Mapping[str, str]) -> Batches:
    return Batches(tmp_path, env)


ClientOf = Callable[..., openai.OpenAI]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """``client_of(server, key)``: OpenAI's client, closed at the end."""
    with ExitStack() as stack:

        def client_of(server: Server, key: str = "none") -> openai.OpenAI:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)
            return stack.enter_context(client)

        yield client_of


def lines(number: int, url: str = "/v1/embeddings") -> bytes:
    """Every tenth is wrong."""
    asked = (
        {"custom_id": f"c{n}", "method": "POST", "url": url, "body": {"input": f"hello {n}" if n % 10 else ""}}
        for n in range(number)
    )
    return b"".join(json.dumps(one).encode() + b"\n" for one in asked)


def created(client: openai.OpenAI, content: bytes, **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    asked = {"endpoint": "/v1/embeddings", "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **asked)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def has_ended() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status in ENDED

    wait_until(has_ended, "the batch ends")
    return found[0]


def ids(client: openai.OpenAI, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).text.splitlines()]


def kill_within(server: Server, batches: Batches) -> None:
    """Once some lines are answered."""
    wait_until(partial(batches.have_grown, batches.num_bytes), "lines are answered")
    server.send_signal(signal.SIGKILL)
    server.wait_exit()


def is_running(client: openai.OpenAI, batch_id: str) -> bool:
    return client.batches.retrieve(batch_id).status == "in_progress"


@pytest.mark.client_call(
    "openai", "OpenAI", "/v1", "files.create, list, retrieve, content, delete; batches.create, list, retrieve"
)
def test_openai_s_client_uploads_waits_and_downloads(batches: Batches, client_of: ClientOf) -> None:
    with batches.serve() as server:
        client = client_of(server)
        batch = created(client, lines(30), metadata={"project": "tests"})
        assert (batch.status, batch.metadata) == ("validating", {"project": "tests"})
        done = ended(client, batch)
        assert done.request_counts is not None
        counts = (done.request_counts.total, done.request_counts.completed, done.request_counts.failed)
        assert (done.status, counts) == ("completed", (30, 27, 3))
        assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
        assert ids(client, done.output_file_id) == [f"c{n}" for n in range(30) if n % 10]
        assert ids(client, done.error_file_id) == ["c0", "c10", "c20"]
        assert [one.id for one in client.batches.list()] == [batch.id]
        files = {one.purpose: one.id for one in client.files.list()}
        assert files.keys() == {"batch", "batch_output"}
        assert client.files.retrieve(files["batch"]).bytes == len(lines(30))
        assert client.files.content(files["batch"]).content == lines(30)
        for file in client.files.list():
            assert client.files.delete(file.id).deleted
        assert [*client.files.list()] == []
        assert [*(batches.folder / "files").iterdir()] == []


@pytest.mark.parametrize(
    "checkpoints_s", [["3600"], pytest.param(["0", "0.05", "0.3", "3600", "0.05"], marks=pytest.mark.slow)]
)
def test_a_server_that_is_killed_at_any_point_answers_every_line_once_in_the_end(
    batches: Batches, client_of: ClientOf, checkpoints_s: list[str]
) -> None:
    number = 300 * len(checkpoints_s)
    with batches.serve(CHECKPOINT_S=checkpoints_s[0]) as server:
        batch = created(client_of(server), lines(number))
        kill_within(server, batches)
    for checkpoint_s in checkpoints_s[1:]:  # behind the last checkpoint stands nothing, little, or a lot
        with batches.serve(CHECKPOINT_S=checkpoint_s) as server:
            kill_within(server, batches)
    with batches.serve() as server:
        client = client_of(server)
        done = ended(client, batch)
        assert done.status == "completed"
        assert ids(client, done.output_file_id) == [f"c{n}" for n in range(number) if n % 10]
        assert ids(client, done.error_file_id) == [f"c{n}" for n in range(0, number, 10)]


@pytest.mark.slow
def test_a_drain_ends_what_is_under_way_and_the_next_start_goes_on(batches: Batches, client_of: ClientOf) -> None:
    with batches.serve() as server:
        client = client_of(server)
        batch = created(client, lines(4_000))
        wait_until(partial(is_running, client, batch.id), "it runs")
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    with batches.serve() as server:
        client = client_of(server)
        assert client.batches.retrieve(batch.id).status in ("validating", "in_progress")
        done = ended(client, batch)
        assert ids(client, done.output_file_id) == [f"c{n}" for n in range(4_000) if n % 10]


@pytest.mark.client_call("openai", "OpenAI", "/v1", "batches.cancel: answers so far; of one that has ended: an error")
@pytest.mark.slow
def test_what_is_cancelled_has_the_answers_so_far_and_an_error_for_every_other_line(
    batches: Batches, client_of: ClientOf
) -> None:
    with batches.serve() as server:
        client = client_of(server)
        batch = created(client, lines(2_000))
        wait_until(partial(is_running, client, batch.id), "it runs")
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch)
        assert done.status == "cancelled"
        assert sorted(ids(client, done.output_file_id) + ids(client, done.error_file_id)) == sorted(
            f"c{n}" for n in range(2_000)
        )
        assert done.error_file_id is not None
        last = json.loads(client.files.content(done.error_file_id).text.splitlines()[-1])
        assert last["error"]["code"] == "batch_cancelled"
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


@pytest.mark.slow
def test_what_is_late_expires_with_an_error_for_every_line_that_is_left(batches: Batches, client_of: ClientOf) -> None:
    with batches.serve() as server:
        client = client_of(server)
        done = ended(client, created(client, lines(3_000), completion_window="1s"))
        assert (done.status, done.expires_at) == ("expired", done.created_at + 1)
        found = ids(client, done.output_file_id) + ids(client, done.error_file_id)
        assert sorted(found) == sorted(f"c{n}" for n in range(3_000))


@pytest.mark.slow
def test_a_wrong_input_fails_with_the_lines_that_are_wrong(batches: Batches, client_of: ClientOf) -> None:
    with batches.serve() as server:
        client = client_of(server)
        content = lines(2) + b"garbage\n" + lines(1) + lines(1, "/embed").replace(b"c0", b"other")
        done = ended(client, created(client, content))
        assert done.status == "failed"
        assert done.errors is not None
        found = [(one.code, one.line) for one in done.errors.data or []]
        assert found == [("invalid_json_line", 3), ("mismatched_endpoint", 5), ("duplicate_custom_id", 4)]
        assert done.output_file_id is done.error_file_id is None


@pytest.mark.slow
def test_a_key_sees_its_own_files_and_batches_alone_and_has_limits(batches: Batches, client_of: ClientOf) -> None:
    keys = "one:0123456789abcdef,other:fedcba9876543210"
    with batches.serve(
        "--batch-open-limit", "1", "--batch-disk-limit", "200000", "--batch-file-limit", "100000", BEI_API_KEYS=keys
    ) as server:
        one, other = client_of(server, "0123456789abcdef"), client_of(server, "fedcba9876543210")
        batch = created(one, lines(600))
        with pytest.raises(openai.PermissionDeniedError, match="batch_open_limit"):
            created(one, lines(1))
        theirs = created(other, lines(10))
        for call in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                call(batch.input_file_id)
        for ask in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/embeddings", completion_window="24h")
        assert [found.id for found in other.batches.list()] == [theirs.id]
        with pytest.raises(openai.APIStatusError, match="batch_file_limit"):
            created(other, lines(2_000))
        other.files.create(file=("in.jsonl", lines(800)), purpose="batch")
        other.files.create(file=("in.jsonl", lines(800)), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="batch_disk_limit"):
            other.files.create(file=("in.jsonl", lines(800)), purpose="batch")
        assert ended(other, theirs).status == "completed"
        failed = ended(one, batch)
        assert failed.errors is not None
        assert [error.code for error in failed.errors.data or []] == ["quota_exceeded"]
