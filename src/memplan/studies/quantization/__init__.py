"""Inference with quantized weights."""
