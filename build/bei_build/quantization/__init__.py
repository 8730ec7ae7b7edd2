"""Post-training quantization: calibration, scales, sensitivity of layers."""
