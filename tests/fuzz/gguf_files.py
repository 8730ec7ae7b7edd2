"""GGUF files: the header and the places of tensors, and a file that is a whole checkpoint."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.weights.gguf_store import GgufStore
from tests.fuzz.mutation import changed_bytes
from tests.fuzz.trial import Trial
from tests.support.checkpoints import save_checkpoint, wordpiece_tokenizer
from tests.support.gguf_files import save_gguf, vocabulary_metadata

# Numbers that are counts, lengths, types or offsets wherever they come to stand.
_WORDS = tuple(
    struct.pack("<Q", value % (1 << 64)) for value in (0, 1, 8, 9, 32, 255, 1 << 31, 1 << 32, 1 << 60, (1 << 63), -1)
)


def _saved(folder: Path) -> Path:
    source = save_checkpoint(folder / "source", num_hidden_layers=1)
    metadata = {**vocabulary_metadata(wordpiece_tokenizer(), "bert"), "bert.pooling_type": 1}
    return save_gguf(source, folder / "good" / "model.gguf", "bert", metadata, kind="Q8_0")


def gguf_file(folder: Path) -> Trial:
    """All of a file by byte, and its first tensors."""
    good, file = _saved(folder).read_bytes(), folder / "changed.gguf"

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, good, _WORDS))
        store = GgufStore(file)
        for name in [*store.shapes][:3]:
            store.read(name)

    return trial


def checkpoint(folder: Path) -> Trial:
    """A file alone, read as a build does before it compiles."""
    good, file = _saved(folder).read_bytes(), folder / "changed" / "model.gguf"
    file.parent.mkdir()

    def trial(random: Random) -> None:
        file.write_bytes(changed_bytes(random, good, _WORDS))
        read_checkpoint(locate(str(file))).weights().close()

    return trial
