"""A model as data: layers, shapes of weights, dtypes, quantization, operation counts."""
