"""Reading tensors: file formats, stored types, shards, and refusals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bei.errors import MissingDependencyError, WeightsError
from bei_build.weights import tensor_store
from bei_build.weights.tensor_store import open_weights, weight_files

TENSORS = {"a.weight": torch.linspace(-3, 3, 12).reshape(3, 4), "a.bias": torch.tensor([0.1, -2.5, 1e-3])}
STORED_TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def save(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder / name


def save_shards(folder: Path, kind: str) -> None:
    stem, suffix = kind.split(".")
    names = [f"{stem}-0000{index}-of-00002.{suffix}" for index in (1, 2)]
    for name, tensor in zip(names, TENSORS, strict=True):
        save(folder, name, {tensor: TENSORS[tensor]})
    index = {"metadata": {}, "weight_map": dict(zip(TENSORS, names, strict=True))}
    (folder / f"{kind}.index.json").write_text(json.dumps(index))


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    store = open_weights(folder)
    assert store.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        array = store.read(name)
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, tensor.float().numpy())
    store.close()


@pytest.mark.parametrize("dtype", STORED_TYPES, ids=str)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_stored_types_widen_exactly(file: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    save(tmp_path, file, tensors)
    assert_holds(tmp_path, tensors)


def test_files_are_mapped_anew_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_store, "_MOST_MAPPED", 1)
    save_shards(tmp_path, "model.safetensors")
    store = open_weights(tmp_path)
    read = {name: store.read(name) for name in TENSORS}
    for name, tensor in TENSORS.items():  # tensors returned before stay valid
        np.testing.assert_array_equal(read[name], tensor.float().numpy())
    assert_holds(tmp_path, TENSORS)


def test_stored_types_are_known(tmp_path: Path) -> None:
    for file, expected in (("pytorch_model.bin", "torch.bfloat16"), ("model.safetensors", "BF16")):
        save(tmp_path, file, {name: tensor.to(torch.bfloat16) for name, tensor in TENSORS.items()})
        assert open_weights(tmp_path).types == {expected}


def test_every_number_of_fp8_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"before": torch.ones(3), "a.weight": numbers.reshape(32, 8), "behind": torch.ones(5).half()}
    save(tmp_path, "model.safetensors", tensors)
    store = open_weights(tmp_path)
    assert isinstance(store, tensor_store.SafetensorsStore)
    assert store.type_of("a.weight") == "F8_E4M3"
    actual = store.read_fp8("a.weight")
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, tensors["a.weight"].float().numpy())
    store.close()


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_shards_are_read_as_one(kind: str, tmp_path: Path) -> None:
    save_shards(tmp_path, kind)
    assert_holds(tmp_path, TENSORS)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_tensor_in_two_shards_is_refused(kind: str, tmp_path: Path) -> None:
    save_shards(tmp_path, kind)
    stem, suffix = kind.split(".")
    first, second = (f"{stem}-0000{index}-of-00002.{suffix}" for index in (1, 2))
    save(tmp_path, second, {**TENSORS, "a.weight": TENSORS["a.weight"] + 1})
    with pytest.raises(WeightsError, match=rf"Tensor a\.weight is in {first} and in {second}.*Download"):
        open_weights(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_integers_are_read_as_such(file: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5).to(dtype), "b": torch.ones(2)}
    save(tmp_path, file, tensors)
    store = open_weights(tmp_path)
    np.testing.assert_array_equal(store.read_integers("a"), np.arange(5))
    assert store.type_of("b") in ("F32", "torch.float32")
    with pytest.raises(WeightsError, match=r"Tensor b is .*32, and must hold integers"):
        store.read_integers("b")
    store.close()


def test_safetensors_are_preferred_to_a_pickle(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", TENSORS)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert_holds(tmp_path, TENSORS)


def test_files_of_torch_before_1_6_are_read(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_holds(tmp_path, TENSORS)


class _RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("is_archive", [True, False], ids=["zip", "legacy"])
def test_a_pickle_that_holds_code_is_refused_and_not_run(is_archive: bool, tmp_path: Path) -> None:
    mark = tmp_path / "the code ran"
    content = {**TENSORS, "evil": _RunsCode(mark)}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin was refused .* Use a safetensors checkpoint"):
        open_weights(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {"state_dict": TENSORS}], ids=["list", "numbers", "nested"])
def test_a_pickle_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="does not map names to tensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(file: str, share: float, tmp_path: Path) -> None:
    path = save(tmp_path, file, TENSORS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightsError, match=rf"{file} (is not a readable|was refused).*(Download|Use a safetensors)"):
        open_weights(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_integer_tensors_are_taken_for_a_quantized_checkpoint(file: str, tmp_path: Path) -> None:
    save(tmp_path, file, {"a.weight": torch.ones(2, 2, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=r"a\.weight is (I8|torch\.int8), not 16-.*16- or 32-bit"):
        open_weights(tmp_path).read("a.weight")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor pytorch_model\.bin.*Download"):
        open_weights(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, "model.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names model-00002-of-00002\.safetensors, which is not in"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_a_malformed_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json .*Download the checkpoint again"):
        open_weights(tmp_path)


def test_a_pickle_without_torch_says_what_to_install_or_to_take_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "pytorch_model.bin", TENSORS)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingDependencyError, match=r"pytorch_model\.bin.* needs the Python package 'torch': install its CPU build"
    ):
        open_weights(tmp_path)
