"""Targets ``tensorrt`` and ``tensorrt-rtx``: a packed ONNX graph to a TensorRT plan."""
