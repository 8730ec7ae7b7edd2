"""Files of a job that are not what bei wrote: a plan is refused by name, a record counts as missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.bulk.folder import folder_at
from bei.bulk.parts import PLAN, _decoded
from bei.bulk.run import _stored_plan
from bei.errors import JobDiffersError

DAMAGED = [b"", b"{", b"[]", b'{"\xff": 1}', b'{"a": ' + b"[" * 100_000, b'{"contents": "\xff"}', b"\0" * 9]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content[:20]))
def test_what_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_bytes(content)
    with pytest.raises(JobDiffersError, match="is not a plan of this version"):
        _stored_plan(folder_at(str(tmp_path)))


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content[:20]))
def test_what_is_no_record_of_a_shard_counts_as_missing(content: bytes) -> None:
    assert _decoded(content) is None
