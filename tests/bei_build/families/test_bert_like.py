"""BERT-shaped models under other names: refused configs, and an extra part of one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.errors import CheckpointError
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import change_config
from tests.support.reading import read, refused, saved
from tests.support.zoo import CASES, save_case


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("BigBirdModel", {"attention_type": "sparse"}, "attention_type = 'sparse'.*'original_full' or 'block_sparse'"),
        ("BigBirdModel", {"is_decoder": True}, "is_decoder = True"),
        ("ErnieModel", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("MegatronBertModel", {"is_decoder": True}, "is_decoder = True"),
        ("XLMRobertaXLModel", {"hidden_act": "laplace"}, "Activation 'laplace'"),
        ("RoFormerModel", {"rotary_value": True}, "rotary_value = True"),
        ("EsmModel", {"position_embedding_type": "relative_key"}, "'absolute' or 'rotary'"),
        ("DebertaModel", {"relative_attention": False}, "relative_attention = False"),
        ("DebertaModel", {"talking_head": True}, "talking_head = True"),
        ("DebertaModel", {"pos_att_type": ["c2p", "p2p"]}, "pos_att_type"),
        ("DebertaV2Model-convolution", {"conv_kernel_size": 4}, "conv_kernel_size = 4: it must be odd"),
        ("DebertaV2Model-convolution", {"conv_groups": 2}, "conv_groups = 2"),
        ("DPRQuestionEncoder", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (
            "EuroBertForSequenceClassification-mean_pooling_before_the_classifier",
            {"classifier_pooling": "max"},
            "bos, mean and late",
        ),
    ],
)
def test_other_forms_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(change_config(saved(tmp_path, name), **changes), CheckpointError, message)


def test_big_birds_texts_are_as_long_as_its_blocks_leave_them_whole(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "BigBirdModel")
    settings = {**case.settings, "block_size": 2, "num_random_blocks": 3}
    folder = save_case(tmp_path, replace(case, settings=settings))
    assert read(folder).max_seq_len == 22  # (5 + 2 * 3) * 2: transformers' bound
    with pytest.raises(CheckpointError, match="max_seq_len 23 is beyond the 22 positions"):
        read(folder, max_seq_len=23)
    assert read(change_config(folder, attention_type="original_full")).max_seq_len == 48


@pytest.mark.parametrize("settings", [{}, {"task": "embed"}, {"pooling": "cls"}])
def test_dprs_projection_stays_whatever_is_asked(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "dpr", "DPRContextEncoder")
    manifest = build_artifact(folder, tmp_path / "artifact", **settings).manifest
    assert manifest.dimension("embedding") == 24
    assert manifest.embedding is not None
    assert manifest.embedding.pooling == "cls"


def test_a_convolution_does_not_reach_over_the_ends_of_texts(tmp_path: Path) -> None:
    """Texts shorter than its reach give the same in a batch as alone."""
    artifact = build_artifact(
        saved(tmp_path / "deberta", "DebertaV2Model-convolution"), tmp_path / "artifact", verify=False
    )
    texts = random_encodings((1, 2, 1, 7, 3, 1), artifact.manifest.spec.vocab_size)
    with running(artifact) as engine:
        together = embed(engine, texts)
        alone = np.concatenate([embed(engine, [text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
