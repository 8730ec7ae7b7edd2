"""Model families, one file each: how an HF config reads as a ModelSpec, and the names of its tensors (``table``)."""
