"""TensorRT's plan, written to its file piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule


def build_into(
    trt: TensorRTModule,
    builder: TensorRTModule.Builder,
    network: TensorRTModule.INetworkDefinition,
    config: TensorRTModule.IBuilderConfig,
    plan: Path,
) -> bool:
    """Build ``network`` into the file ``plan``; False, and no file, if TensorRT builds no plan. Raises OSError."""
    try:
        with plan.open("wb") as file:
            if not hasattr(trt, "IStreamWriter"):
                memory = builder.build_serialized_network(network, config)
                if memory is not None:
                    file.write(memoryview(memory))
                is_built = memory is not None
            else:
                writer = _writer_of(trt, file)
                is_built = bool(builder.build_serialized_network_to_stream(network, config, writer))
                if writer.error is not None:
                    raise writer.error
    except BaseException:
        plan.unlink(missing_ok=True)
        raise
    if not is_built:
        plan.unlink()
    return is_built


def _writer_of(trt: TensorRTModule, file: Any) -> Any:
    """TensorRT's stream writer for ``file``. A failed write ends the build; the exception must not reach TensorRT."""

    base: Any = trt.IStreamWriter

    class Writer(base):  # type: ignore[misc]  # a class of the library, known when it runs
        def __init__(self) -> None:
            base.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return int(file.write(data))
            except OSError as error:
                self.error = error
                return 0

    return Writer()
