"""Graphs shared by several tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.artifact.manifest import OutputInfo
from tests.bei.engine.tensorrt.rig import OUTPUTS, Graphs, Rig
from tests.bei_build.targets.tiny import HIDDEN, VOCABULARY, tiny_spec, with_heads_on_tokens


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """Graphs of a tiny BERT."""
    return Graphs(tmp_path_factory.mktemp("bert"), tiny_spec(), OUTPUTS)


@pytest.fixture(scope="session")
def many_outputs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    """A tiny BERT with outputs for each sequence and each token."""
    outputs = [
        OutputInfo(name="embedding", dimension=HIDDEN),
        OutputInfo(name="token_weights", dimension=1, per_token=True),
        OutputInfo(name="token_embedding", dimension=16, per_token=True),
        OutputInfo(name="sparse", dimension=VOCABULARY),
    ]
    return Graphs(tmp_path_factory.mktemp("heads"), with_heads_on_tokens(tiny_spec()), outputs)


@pytest.fixture
def rig(graphs: Graphs, tmp_path: Path) -> Rig:
    """The tiny BERT as a plan on a simulated H200."""
    return Rig(tmp_path, graphs)
