"""Quantization: specs, recipes, passes, checkpoints, GGUF export and the command line."""
