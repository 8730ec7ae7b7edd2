"""An ONNX file (onnx.proto of the onnx project): found in a folder, and parsed by the onnx package under a limit.

Empty messages take two bytes of a file and a hundred of memory, so a copy of this process parses it first, and may use
no more than a model of the file's size needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bei.errors import WeightsError
from bei.utils.libraries import importing
from bei.utils.untrusted_files import UnfitError, read_bounded, within
from bei_build.files.sandbox import SandboxError, run_bounded

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

SUFFIX = ".onnx"
_USUAL = (f"model{SUFFIX}", f"onnx/model{SUFFIX}")
_MOST_BYTES = (1 << 31) - 1  # protobuf's; larger models have their tensors in files beside
_MOST_NODES = 500_000
_MOST_TENSORS = 100_000
# What parsing may take: the file, a copy of it, and its parts.
_MEMORY_PER_BYTE = 3
_MEMORY = 256 << 20
_SECONDS, _BYTES_PER_SECOND = 30.0, 20e6


def find_onnx(folder: Path) -> Path | None:
    """The ONNX file of ``folder`` or of its folder onnx: model.onnx, or the only one; None where there is none. Raises
    WeightsError for several."""
    for name in _USUAL:
        if (folder / name).is_file():
            return folder / name
    found = sorted(path for pattern in (f"*{SUFFIX}", f"onnx/*{SUFFIX}") for path in folder.glob(pattern))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:10])
        raise WeightsError(
            f"{folder} has {len(found)} ONNX files, none of them model{SUFFIX} ({names}): rename the one to build."
        )
    return found[0] if found else None


def read_model(file: Path) -> ModelProto:
    """The content of ``file``, without that of other files. Raises WeightsError, MissingDependencyError."""
    with importing("onnx", "cpu", "Reading an ONNX file"):
        from onnx import ModelProto
    try:
        content = read_bounded(file, _MOST_BYTES)

        def parse() -> str:
            ModelProto.FromString(content)
            return ""

        run_bounded(parse, _SECONDS + len(content) / _BYTES_PER_SECOND, _MEMORY + _MEMORY_PER_BYTE * len(content))
        model: ModelProto = ModelProto.FromString(content)
        for count, most, what in (
            (len(model.graph.node), _MOST_NODES, "nodes"),
            (len(model.graph.initializer), _MOST_TENSORS, "tensors"),
        ):
            if count > most:
                raise UnfitError(f"it has {count:,} {what}, and no model has more than {most:,}")
        if not model.graph.node:
            raise UnfitError("it has no graph")
    except (UnfitError, SandboxError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WeightsError(f"{file} is not a readable ONNX file ({reason}). Download it again.") from error
    return model


def external_files(file: Path) -> list[Path]:
    """The files beside ``file`` that hold its tensors. Raises WeightsError, also for one outside of its folder."""
    model = read_model(file)
    places = (external_place(tensor, file) for tensor in model.graph.initializer if is_external(tensor))
    return sorted({path for path, _ in places})


def is_external(tensor: TensorProto) -> bool:
    """True if the numbers of ``tensor`` are in another file."""
    return tensor.data_location == tensor.EXTERNAL


def external_place(tensor: TensorProto, file: Path) -> tuple[Path, int]:
    """The file with the numbers of ``tensor``, and where they begin. Raises WeightsError."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, offset = entries.get("location", ""), entries.get("offset", "0")
    try:
        if not location or not offset.isascii() or not offset.isdigit() or len(offset) > 18:
            raise UnfitError(f"location {location[:80]!a}, offset {offset[:80]!a}")
        path = within(file.parent, location)
        if not path.is_file():
            raise UnfitError(f"{location[:80]!a} is not there")
    except UnfitError as error:
        raise WeightsError(
            f"{file} has tensor {tensor.name[:80]!a} in another file, which is not read ({error}): put the files of "
            "one export into one folder."
        ) from error
    return path, int(offset)
