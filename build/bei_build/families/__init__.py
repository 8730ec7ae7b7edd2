"""Model families, one file each: an HF config as a ModelSpec, and the names of its tensors (``table``)."""
