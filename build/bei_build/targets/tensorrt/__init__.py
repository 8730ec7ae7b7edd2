"""Targets ``tensorrt`` and ``tensorrt-rtx``: packed ONNX graph to a TensorRT plan, strongly typed in one float type.

The two libraries have the same classes, and what compiles takes the module as an argument. TensorRT-RTX compiles ahead
of time for GPUs that need not be there, so its plans are built in tests; TensorRT needs the GPU, and no plan of it has
been built by these functions yet.
"""

from bei_build.targets.tensorrt.compiler import TensorRTCompiler

__all__ = ["TensorRTCompiler"]
