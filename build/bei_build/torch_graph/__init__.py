"""ModelSpec to a packed ``torch.nn.Module``: the twin of ``bei_build.onnx_graph``, one subject per file.

The only package of the builder that imports torch at module level; its users import it in functions.
"""
