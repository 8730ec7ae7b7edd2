"""ModelSpec and weights in, packed ONNX graph out."""
