"""ModelSpec and weights to a packed ONNX graph."""
