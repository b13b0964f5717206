"""Tensor operations on plain tensors and numbers: packing twins, the definition of quantize and dequantize, op dispatch. Imports nothing from the other folders."""
