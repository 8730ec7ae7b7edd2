"""The module for PyTorch against the Hugging Face classes: every case of ``tests.support.zoo``; each feature
matters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.spec.model_spec import ModelSpec
from bei_build.torch_graph.model import PackedModel, packed_model
from bei_build.torch_graph.parameters import TensorOptions
from tests.bei_build.test_parity_matrix import BY_NAME, FEATURES, TOLERANCE, save
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.model_matrix import difference, least_cosine, pooled, poolings_of
from tests.support.reading import read
from tests.support.zoo import CASES, MAX_TOKENS, Case, by_tier, hf_outputs, spec_of

# A class of each structure; what the others compute is in one of these too.
STRUCTURES = (
    "BertForTokenClassification",
    "AlbertModel",  # layers that share weights, projected embeddings
    "BartForSequenceClassification",  # a decoder, the last marked token
    "MBartModel",  # a decoder that begins with a token of the text
    "CLIPTextModelWithProjection-end_of_text_by_the_largest_id",
    "DebertaV2Model-convolution",
    "DebertaV2Model-own_position_projections",
    "EsmModel",  # dropped mask tokens, rotation
    "Gemma2Model",  # norms in front and behind, soft cap, window, an odd score scale
    "Gemma3TextModel",  # norms of heads with an offset
    "GPTNeoForSequenceClassification",  # the last token that is not padding
    "GPTJModel",  # attention and MLP side by side, neighbours turn
    "LlamaModel-llama3_rope_and_biases",  # causal, grouped queries, gated MLP
    "Lfm2Model-biases",  # gated convolutions
    "ModernBertForMaskedLM",  # windows, the first norm missing, SPLADE
    "NemotronModel",  # LayerNorm with an offset, squared ReLU, partial rotation
    "Olmo2Model",  # norms behind only, norms of all heads together
    "OlmoModel",  # norms without weights, clipped projections
    "RobertaModel",  # positions counted over what is not padding
    "Phi3Model",  # another rotation for long texts
    "T5EncoderModel-gated",  # relative bias
)
FIRST = tuple(BY_NAME[name] for name in STRUCTURES)


def module_of(checkpoint: Checkpoint, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32) -> PackedModel:
    with checkpoint.weights() as weights:
        return packed_model(spec or checkpoint.spec, weights.read, checkpoint.max_seq_len, dtype=dtype)


@pytest.mark.parametrize("case", by_tier(*FIRST))
def test_the_module_equals_the_hf_class_in_batches_and_alone(case: Case, tmp_path: Path) -> None:
    saved = save(case, tmp_path / "checkpoint")
    for pooling in poolings_of(case):
        model = module_of(read(saved.folder, pooling=pooling))
        expected = pooled(case, saved.rows, pooling)
        in_one_batch = of_the_module(model, saved.encodings)[case.output]
        alone = [of_the_module(model, [encoding])[case.output][0] for encoding in saved.encodings]
        assert difference(in_one_batch, expected) <= TOLERANCE
        assert difference(alone, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_module_equals_the_onnx_graph(case: Case, tmp_path: Path) -> None:
    saved = save(case, tmp_path / "checkpoint")
    checkpoint = read(saved.folder)
    with checkpoint.weights() as weights:
        arguments = checkpoint.spec, weights.read, checkpoint.max_seq_len, saved.encodings
        expected = of_the_graph(*arguments, tmp_path / "graph")
    actual = of_the_module(module_of(checkpoint), saved.encodings)
    assert actual.keys() == expected.keys()
    for name, rows in actual.items():
        assert difference(rows, expected[name]) <= TOLERANCE


@pytest.mark.parametrize(
    "case", by_tier(*(BY_NAME[name] for name in ("BertModel", "EsmModel", "Gemma3TextModel", "T5EncoderModel")))
)
def test_in_bf16_the_module_stays_close_to_the_hf_class(case: Case, tmp_path: Path) -> None:
    saved = save(case, tmp_path / "checkpoint")
    actual = of_the_module(module_of(read(saved.folder), dtype=torch.bfloat16), saved.encodings)[case.output]
    expected = pooled(case, saved.rows, None)
    found = least_cosine(case, actual, expected)
    if found < 0.999:  # a model that loses more in BF16, whoever computes it
        theirs = hf_outputs(saved.folder, case, saved.encodings, torch.bfloat16)
        assert found >= least_cosine(case, pooled(case, theirs, None), expected)
    assert found >= 0.998
    assert difference(actual, expected) > 1e-5  # it is not FP32 under another name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(
            name, change, id=f"{name}-{feature}".replace(" ", "_"), marks=() if index < 3 else pytest.mark.slow
        )
        for index, (name, feature, change) in enumerate(FEATURES)
    ],
)
def test_a_module_without_a_feature_is_another_model(
    name: str, change: Callable[[ModelSpec], ModelSpec], tmp_path: Path
) -> None:
    saved = save(BY_NAME[name], tmp_path / "checkpoint")
    checkpoint = read(saved.folder)
    model = module_of(checkpoint, change(checkpoint.spec))
    actual = of_the_module(model, saved.encodings)["embedding"]
    assert difference(actual, pooled(saved.case, saved.rows, None)) > 5 * TOLERANCE


def test_the_weights_of_every_case_have_the_names_and_shapes_of_the_spec() -> None:
    for case in CASES:
        spec = spec_of(case)
        model = PackedModel(spec, MAX_TOKENS, TensorOptions(torch.device("cpu"), torch.float32))
        found = {name: tuple(tensor.shape) for name, tensor in model.weights_by_name().items()}
        assert found == dict(spec.weights()), case.name
