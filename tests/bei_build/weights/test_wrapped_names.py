"""Tensors with prefixes from torch's wrappers, or from a model around the model: for the engine, and for the reference,
which transformers would silently fill with random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.errors import VerificationError, WeightsError
from bei_build.families.table import family_of
from bei_build.reference.hf_model import HFReference
from bei_build.weights.stored_names import StoredNames
from tests.model_matrix import LENGTHS, default_pooling, difference, pooled, run
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_config, read_tensors, write_tensors
from tests.support.reading import read, refused, saved
from tests.support.zoo import (
    CASES,
    FIRST_OF_FAMILY,
    Case,
    by_tier,
    config_of,
    encodings_of,
    hf_outputs,
    save_case,
    spec_of,
)

Rename = Callable[[str], str]


def behind(prefix: str) -> Rename:
    return lambda name: prefix + name


def compiled_layers(name: str) -> str:
    """Names that torch.compile leaves for each layer of a compiled model."""
    return "_orig_mod." + re.sub(r"(layers?\.\d+\.)", r"\1_orig_mod.", name)


def renamed(folder: Path, rename: Rename) -> Path:
    return write_tensors(folder, {rename(name): tensor for name, tensor in read_tensors(folder).items()})


def to_pickle(folder: Path) -> Path:
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    ("name", "rename", "pickled"),
    [
        ("BertModel", behind("_orig_mod."), False),  # torch.compile
        ("BertModel", behind("module."), True),  # DistributedDataParallel
        ("BertModel", behind("0.auto_model."), True),  # the state dict of a SentenceTransformer
        ("BertForSequenceClassification", behind("model._orig_mod."), False),
        ("LlamaForCausalLM", behind("0.auto_model._orig_mod."), True),
        ("LlamaModel", compiled_layers, False),
        ("T5EncoderModel", behind("encoder."), False),
    ],
    ids=["compile", "ddp", "sentence-transformers", "classifier", "decoder", "layers", "encoder"],
)
def test_engine_and_reference_read_tensors_behind_wrappers(
    name: str, rename: Rename, pickled: bool, tmp_path: Path
) -> None:
    case = case_named(name)
    folder = save_case(tmp_path / "checkpoint", case)
    encodings = encodings_of(case, LENGTHS, case.tokenizer().get_vocab_size())
    expected = pooled(case, hf_outputs(folder, case, encodings), default_pooling(case))
    renamed(folder, rename)
    artifact = build_artifact(to_pickle(folder) if pickled else folder, tmp_path / "artifact")
    actual, _ = run(artifact, case.output, encodings)
    assert difference(actual, expected) <= 2e-4
    assert artifact.certificate.reference.startswith("transformers, FP32")
    assert artifact.certificate.outputs[0].cosine_mean >= 0.99999


@pytest.mark.parametrize("case", by_tier(*FIRST_OF_FAMILY[::6]))
def test_every_family_is_found_behind_a_wrapper(case: Case, tmp_path: Path) -> None:
    folder = save_case(tmp_path / "checkpoint", case)
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        expected = {name: weights.read(name) for name, _ in checkpoint.spec.weights()}
        assert not weights.is_renamed
    renamed(folder, behind("0.auto_model._orig_mod."))
    with read(folder).weights() as weights:
        assert weights.is_renamed
        for name, array in expected.items():
            np.testing.assert_array_equal(weights.read(name), array)


SEGMENTS = ("_orig_mod", "module", "0", "auto_model", "model", "encoder", "bert", "text_model")


@settings(max_examples=100, deadline=None)
@given(
    case=st.sampled_from(FIRST_OF_FAMILY),
    segments=st.lists(
        st.sampled_from(["_orig_mod", "module", "0", "auto_model", "model", "encoder", "bert", "text_model"]),
        max_size=4,
    ),
    has_prefix=st.booleans(),
)
def test_whatever_is_in_front_of_all_tensors_each_is_found(case: Case, segments: list[str], has_prefix: bool) -> None:
    family = family_of(config_of(case).model_type, case.architecture, {})
    names = StoredNames(family)
    front = "".join(f"{segment}." for segment in segments) + (family.prefix if has_prefix else "")
    stored = {ours: front + names.find(ours, ()) for ours, _ in spec_of(case).weights()}
    library = names.unwrapped(set(stored.values()))
    for ours, name in stored.items():
        assert library[name] == names.find(ours, library.values())


def test_tensors_that_are_not_behind_the_wrapper_are_refused_by_name(tmp_path: Path) -> None:
    folder = renamed(saved(tmp_path, "BertModel"), behind("0.auto_model."))
    write_tensors(folder, {**read_tensors(folder), "2.linear.weight": torch.ones(2, 2)})
    refused(folder, WeightsError, r"Tensor 2\.linear\.weight is not part of this architecture")


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertModel")
    tensors = read_tensors(folder)
    pairs = {f"{side}.{name}": tensor.clone() for name, tensor in tensors.items() for side in ("query", "document")}
    refused(
        write_tensors(folder, pairs),
        WeightsError,
        r"has two models, document\.embeddings\.\S+ and query\.embeddings\.\S+: leave one of them",
    )


def test_a_tensor_inside_and_outside_of_a_wrapper_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertModel")
    tensors = read_tensors(folder)
    name = "encoder.layer.0.output.dense.bias"
    write_tensors(folder, {**tensors, f"_orig_mod.{name}": tensors[name].clone()})
    refused(folder, WeightsError, rf"Tensors _orig_mod\.{name} and {name} are both {name}: take the one out")


# A reference never has random numbers.


def test_a_reference_whose_tensors_transformers_does_not_find_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read(renamed(saved(tmp_path, "BertModel"), behind("_orig_mod.")))
    with checkpoint.weights() as weights:
        HFReference(checkpoint, weights)
        weights.is_renamed = False  # as if transformers found them
        with pytest.raises(VerificationError, match=r"AutoModel does not find .* \(and \d+ more\).* random"):
            HFReference(checkpoint, weights)


def test_a_reference_of_untied_embeddings_that_are_not_stored_is_refused(tmp_path: Path) -> None:
    """transformers reads BART's ``shared`` without using it if config.json unties its tables."""
    checkpoint = read(change_config(saved(tmp_path, "BartModel"), tie_word_embeddings=False))
    with (
        checkpoint.weights() as weights,
        pytest.raises(VerificationError, match=r"does not find decoder\.embed_tokens\.weight \(and 1 more\).*engine"),
    ):
        HFReference(checkpoint, weights)


def test_a_reference_without_its_pooler_is_one(tmp_path: Path) -> None:
    """No built output depends on it; transformers' class has one, with random numbers."""
    folder = saved(tmp_path, "BertModel")
    kept = {name: tensor for name, tensor in read_tensors(folder).items() if not name.startswith("pooler.")}
    checkpoint = read(write_tensors(folder, kept))
    with checkpoint.weights() as weights:
        HFReference(checkpoint, weights)
