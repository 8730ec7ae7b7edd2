"""What a service needs to read labels by a tower of their own: their encoder, and what the tower's steps cost."""

from __future__ import annotations

from dataclasses import dataclass

from bei.artifact.manifest import LABEL_TOKENIZER, Artifact
from bei.scheduler.cost_model import CostModel
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.label_encoder import LabelEncoder

# For answers of the tower of labels, whatever the setting for others says: thousands of labels.
CACHE_MEGABYTES = 16


@dataclass(frozen=True)
class LabelSide:
    """``costs``: of steps of the engine of labels."""

    encoder: LabelEncoder
    costs: CostModel


def label_encoder_of(artifact: Artifact) -> LabelEncoder | None:
    """Of the tower of labels; None: the model has none. Raises ArtifactError."""
    tower = artifact.manifest.label_tower
    if tower is None:
        return None
    encoder = TextEncoder(
        artifact.file(LABEL_TOKENIZER),
        tower.max_seq_len,
        truncation_side=tower.tokenization.truncation_side,
        split_special_tokens=tower.tokenization.splits_special_tokens,
        vocab_size=tower.spec.vocab_size,
    )
    artifact.check_files()
    return LabelEncoder(encoder, tower.max_seq_len)
