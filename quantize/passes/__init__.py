"""Quantization passes: each a pure function of tensors with a thin adapter."""
