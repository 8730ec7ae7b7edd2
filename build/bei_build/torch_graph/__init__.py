"""ModelSpec to a packed ``torch.nn.Module``: the twin of ``bei_build.onnx_graph``, one subject a file.

The only package of the builder that imports torch at module level; whoever uses it imports it in a function.
"""
