"""Fused Triton kernels for the steps between matrix products; ``torch_graph.fusion_choice`` decides where they run.

They need Triton, so modules here are imported in functions. Each kernel is behind an operator of PyTorch
(``torch.library.triton_op``), which ``torch.export`` records and Inductor replaces by the kernel itself. Numbers are
computed in FP32 and rounded once, at the end. Floats are ``tl.constexpr``: as arguments of a package they
would be FP64.
"""
