"""Matrices in few bits: what compressed-tensors makes of its own files, and the formulas of the other methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bei.errors import CheckpointError, WeightsError
from tests.support.builds import build_artifact
from tests.support.checkpoints import change_config, read_tensors, write_tensors
from tests.support.reading import read, refused
from tests.support.zoo import CASES, Case, save_case

_CASE = next(case for case in CASES if case.name == "Qwen3Model")
_SETTINGS = {**_CASE.settings, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_Words = npt.NDArray[np.int64]


def _saved(folder: Path) -> Path:
    return save_case(folder, Case(_CASE.family, _CASE.architecture, _SETTINGS, _CASE.tokenizer))


def _packed(folder: Path, pack: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Replace the matrices of layers by what ``pack`` makes of them, which has the numbers under "wanted"; returns
    those."""
    tensors, wanted = {}, {}
    for name, tensor in read_tensors(folder).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        module = name.removesuffix("weight")
        for part, made in pack(module, tensor).items():
            if part == "wanted":
                wanted[name] = made
            else:
                tensors[f"{module}{part}"] = made.contiguous()
    write_tensors(folder, tensors)
    return wanted


def _check(folder: Path, wanted: Mapping[str, torch.Tensor], name: str, tolerance: float = 1e-6) -> None:
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        assert weights.dequantized == (name,)
        found = dict(weights.stored_tensors())
    assert len(wanted) == 21
    for tensor, numbers in wanted.items():
        np.testing.assert_allclose(found[tensor], numbers.float().numpy(), rtol=tolerance, atol=1e-7, err_msg=tensor)


def _words(numbers: _Words, bits: int) -> torch.Tensor:
    """Numbers packed by rows into words, the lowest bits first."""
    count = 32 // bits
    each = numbers.reshape(len(numbers), -1, count) << (np.arange(count) * bits)
    return torch.from_numpy(each.sum(-1).astype(np.uint32).view(np.int32))


def _gptq(bits: int, *, version: int = 1, shuffled: bool = False) -> Callable[[str, torch.Tensor], dict[str, Any]]:
    random = np.random.default_rng(bits)

    def pack(module: str, matrix: torch.Tensor) -> dict[str, Any]:
        rows, columns = matrix.shape
        count = columns // 16
        groups = np.arange(columns) // 16
        if shuffled:
            groups = random.permutation(groups)
        numbers = random.integers(0, 1 << bits, (rows, columns))
        zeros = random.integers(1, 1 << bits, (count, rows))
        scales = random.uniform(0.001, 0.01, (count, rows)).astype(np.float16)
        return {
            "qweight": _words(numbers, bits).T,
            "qzeros": _words(zeros - (version == 1), bits),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "wanted": torch.from_numpy((numbers - zeros[groups].T) * scales.astype(np.float32)[groups].T),
        }

    return pack


@pytest.mark.parametrize(
    ("bits", "version", "shuffled"), [(4, 1, False), (4, 2, True), (8, 2, False), (8, 1, True), (2, 1, False)]
)
def test_gptq_is_numbers_less_zero_points_times_the_scales_of_their_groups(
    tmp_path: Path, bits: int, version: int, shuffled: bool
) -> None:
    folder = _saved(tmp_path)
    wanted = _packed(folder, _gptq(bits, version=version, shuffled=shuffled))
    form = {"format" if bits == 8 else "checkpoint_format": "gptq_v2"} if version == 2 else {}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": shuffled, **form}
    change_config(folder, quantization_config=settings)
    _check(folder, wanted, f"GPTQ's {bits}-bit")


def _awq(module: str, matrix: torch.Tensor) -> dict[str, Any]:
    random = np.random.default_rng(len(module))
    rows, columns = matrix.shape
    numbers = random.integers(0, 16, (columns, rows))
    zeros = random.integers(0, 16, (columns // 32, rows))
    scales = random.uniform(0.001, 0.01, zeros.shape).astype(np.float16)

    def ordered(values: _Words) -> torch.Tensor:
        return _words(values.reshape(len(values), -1, 8)[:, :, (0, 2, 4, 6, 1, 3, 5, 7)].reshape(values.shape), 4)

    spread = np.arange(columns) // 32
    wanted = (numbers - zeros[spread]) * scales.astype(np.float32)[spread]
    packed = {"qweight": ordered(numbers), "qzeros": ordered(zeros), "scales": torch.from_numpy(scales)}
    return {**packed, "wanted": torch.from_numpy(wanted.T)}


def test_awq_has_its_own_order_of_columns(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    wanted = _packed(folder, _awq)
    change_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
    _check(folder, wanted, "AWQ's 4-bit")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"group_size": None}, CheckpointError, "group_size = None: correct it"),
        ({"group_size": 64}, WeightsError, "scales a row, and group_size is 64: correct"),
        ({"version": None, "format": "gemv"}, CheckpointError, "version = 'gemv'"),
        ({"format": "gemv"}, CheckpointError, r"version and format, which differ \(gemm, gemv\)"),
    ],
)
def test_settings_of_awq_that_its_scales_or_libraries_contradict_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = _saved(tmp_path)
    _packed(folder, _awq)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", **changes}
    change_config(folder, quantization_config={key: value for key, value in settings.items() if value is not None})
    with pytest.raises(error, match=message):
        _read_all(folder)


def _read_all(folder: Path) -> None:
    with read(folder).weights() as weights:
        dict(weights.stored_tensors())


def _weights(**settings: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **settings}


_COMPRESSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "int4 by groups": ("pack-quantized", _weights()),
    "int4 with zero points": ("pack-quantized", _weights(symmetric=False)),
    "int8 by channels": ("pack-quantized", _weights(num_bits=8, strategy="channel", group_size=None)),
    "int3 by groups": ("pack-quantized", _weights(num_bits=3)),
    "int8 for int8 inputs": ("int-quantized", _weights(num_bits=8, strategy="channel", group_size=None)),
    "fp8 by matrix": ("float-quantized", _weights(num_bits=8, type="float", strategy="tensor", group_size=None)),
    "fp8 by channels": ("float-quantized", _weights(num_bits=8, type="float", strategy="channel", group_size=None)),
    "fp8 by blocks": (
        "float-quantized",
        _weights(num_bits=8, type="float", strategy="block", group_size=None, block_structure=[32, 16]),
    ),
    "NVFP4": ("nvfp4-pack-quantized", _weights(type="float", strategy="tensor_group", group_size=16)),
    "MXFP4": ("mxfp4-pack-quantized", _weights(type="float", scale_dtype="uint8")),
    "MXFP8": ("mxfp8-quantized", _weights(num_bits=8, type="float", scale_dtype="uint8")),
}


@pytest.mark.parametrize("name", _COMPRESSED)
def test_compressed_tensors_are_what_their_library_makes_of_them(tmp_path: Path, name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form, weights = _COMPRESSED[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    library = compressors.BaseCompressor.get_value_from_registry(form)
    random = torch.Generator().manual_seed(3)

    def pack(module: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        shapes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 32), -(-columns // 16))}
        shape = shapes.get(weights["strategy"], (rows, columns // (weights["group_size"] or 1)))
        state = {"weight": matrix, "weight_scale": torch.rand(shape, generator=random) * 0.05 + 0.01}
        if "mx" in form:
            state["weight_scale"] = 2.0 ** torch.randint(-8, 0, shape, generator=random).float()
        if form.startswith("nvfp4"):
            state["weight_global_scale"] = torch.tensor([400.0])
            state["weight_scale"] = (state["weight_scale"] * 400).to(torch.float8_e4m3fn).float()
        if not weights["symmetric"]:
            state["weight_zero_point"] = torch.randint(-8, 8, shape, generator=random, dtype=torch.int8)
        packed = library.compress(state, scheme)
        wanted = library.decompress(dict(packed), scheme)["weight"]
        return {**{part: tensor for part, tensor in packed.items() if tensor is not None}, "wanted": wanted}

    folder = _saved(tmp_path)
    wanted = _packed(folder, pack)
    settings = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    change_config(folder, quantization_config={**settings, "config_groups": {"group_0": {"weights": weights}}})
    # The library computes NVFP4 in bfloat16.
    _check(folder, wanted, f"compressed-tensors' {form}", 2**-8 if form.startswith("nvfp4") else 1e-6)


def _modelopt_fp4(module: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(len(module))
    rows, columns = matrix.shape
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    scales = (torch.rand(rows, columns // 16, generator=random) * 100 + 1).to(torch.float8_e4m3fn)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    return {
        "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.0007),
        "input_scale": torch.tensor(0.5),
        "wanted": numbers * scales.float().repeat_interleave(16, 1) * 0.0007,
    }


def _modelopt_fp8(module: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(len(module))
    exponents = torch.randint(110, 130, (matrix.shape[0], matrix.shape[1] // 32), generator=random)
    numbers = (matrix * 50).to(torch.float8_e4m3fn)
    wanted = numbers.float() * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)
    return {"weight": numbers, "weight_scale": exponents.to(torch.uint8), "wanted": wanted}


@pytest.mark.parametrize(("algorithm", "pack"), [("NVFP4", _modelopt_fp4), ("MXFP8", _modelopt_fp8)])
def test_modelopt_s_formats_are_dequantized(tmp_path: Path, algorithm: str, pack: Any) -> None:
    folder = _saved(tmp_path)
    wanted = _packed(folder, pack)
    change_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
    _check(folder, wanted, f"ModelOpt's {algorithm}")


def test_a_packed_checkpoint_builds_and_its_certificate_says_so(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "source")
    _packed(folder, _gptq(4))
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16})
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert "its GPTQ's 4-bit weights dequantized" in (artifact.path / "certificate.json").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"gptq|GPTQ, bits = 3\); of this method bei reads 2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0: correct it"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point = false"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format = 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "no config_groups with weights"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"a": 1}},
            "transform_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": _weights()}, "b": {"weights": _weights(num_bits=8)}},
            },
            "config_groups of several kinds",
        ),
    ],
)  # fmt: skip
def test_variants_that_are_not_read_are_named(tmp_path: Path, settings: Mapping[str, Any], message: str) -> None:
    folder = _saved(tmp_path)
    change_config(folder, quantization_config=settings)
    refused(folder, CheckpointError, message)


def _spoilt(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = read_tensors(folder)
        prefix = next(one for one in tensors if one.endswith("q_proj.qweight")).removesuffix("qweight")
        write_tensors(folder, {**tensors, f"{prefix}{name}": tensor})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoilt("g_idx", torch.full((64,), 99, dtype=torch.int32)), "do not fit its 4 scales"),
        (_spoilt("g_idx", torch.full((64,), -1, dtype=torch.int32)), "do not fit its 4 scales"),
        (_spoilt("g_idx", torch.zeros(3, dtype=torch.int32)), "do not fit its 4 scales"),
        (_spoilt("scales", torch.ones(4, 3)), "is missing, or its shape is not"),
        (_spoilt("scales", torch.full((4, 64), torch.nan)), "does not give finite numbers"),
        (_spoilt("qzeros", torch.full((4, 8), -1, dtype=torch.int32)), "take for two different numbers"),
        (_spoilt("qzeros", torch.zeros(4, 5, dtype=torch.int32)), "5 words a row for 64 numbers of 4 bits"),
        (_spoilt("qzeros", torch.zeros(4, 8)), "is missing, or has no 32-bit words"),
        (_spoilt("qweight", torch.zeros(8, 64, 2, dtype=torch.int32)), "has 3 dimensions"),
        (_spoilt("qweight", torch.zeros(8, 3, dtype=torch.int32)), "has shape"),
    ],
)  # fmt: skip
def test_damaged_matrices_are_refused_in_one_line(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    folder = _saved(tmp_path)
    _packed(folder, _gptq(4))
    spoil(folder)
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 16})
    with pytest.raises(WeightsError, match=message) as info, read(folder).weights() as weights:
        dict(weights.stored_tensors())
    assert "\n" not in str(info.value)
