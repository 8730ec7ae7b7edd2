"""Fixtures of the builder's tests: one tiny checkpoint and one artifact, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.support.builds import build_artifact


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_threaded_torch() -> Iterator[None]:
    """Tiny matrices are slower on several threads; transformers draws progress bars on stderr."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT checkpoint. Read-only: copy it to change it."""
    from tests.support.checkpoints import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def bert_artifact(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """``bert``, built in FP32. Read-only."""
    return build_artifact(bert, tmp_path_factory.mktemp("artifacts") / "bert")
