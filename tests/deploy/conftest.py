"""The tier ``deploy``: the chart, rendered by Helm's own library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the tier's packages its modules cannot be imported. Whoever asks for the tier gets the ImportError."""
    is_asked = "deploy" in config.option.markexpr.replace("not deploy", "")
    return None if is_asked or not collection_path.name.startswith("test_") else True


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Every test beside this file belongs to the tier."""
    for item in items:
        if item.nodeid.startswith("tests/deploy/"):
            item.add_marker(pytest.mark.deploy)
