"""TensorRT's plan, written to its file piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def build_into(trt: Any, builder: Any, network: Any, config: Any, plan: Path) -> bool:
    """Build ``network`` into the file ``plan``; False, and no file, if TensorRT has no plan. Raises OSError."""
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


def _writer_of(trt: Any, file: Any) -> Any:
    """TensorRT's stream into ``file``. What cannot be written ends the build; TensorRT must not see the exception."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]  # a class of the library, known when it runs
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                return int(file.write(data))
            except OSError as error:
                self.error = error
                return 0

    return Writer()
