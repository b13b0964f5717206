"""The dry run: what a quantization would give, need and take, without reading a weight."""
