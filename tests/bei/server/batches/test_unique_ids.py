"""Ids that a batch has twice are found, in memory and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.server.batches.unique_ids import UniqueIds, digest_of


@pytest.mark.parametrize("most_bytes", [16, 1_000, 1_000_000])
def test_an_id_that_was_added_twice_is_found_wherever_its_digest_lies(tmp_path: Path, most_bytes: int) -> None:
    with UniqueIds(tmp_path, most_bytes) as ids:
        for number in range(300):
            ids.add(f"id-{number}")
        assert ids.repeated() == set()
        ids.add("id-7")
        assert ids.repeated() == {digest_of("id-7")}
    assert [*tmp_path.iterdir()] == []


def test_none_of_none_is_repeated(tmp_path: Path) -> None:
    with UniqueIds(tmp_path) as ids:
        assert ids.repeated() == set()
