"""Post-training quantization: what is quantized and by which scales, and how that is found."""
