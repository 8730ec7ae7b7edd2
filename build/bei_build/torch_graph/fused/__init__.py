"""Steps between the matrix products as one Triton kernel each; ``bei_build.torch_graph.fusion_choice`` says where they run.

Needs Triton; whoever uses a module here imports it in a function. Each kernel stands behind an operator of PyTorch
(``torch.library.triton_op``), which ``torch.export`` records and Inductor replaces by the kernel itself. Numbers are
computed in FP32 and rounded once, at the end.
"""
