"""References that engines are compared with: the HF model, the PyTorch module, held-out texts, the retrieval set."""
