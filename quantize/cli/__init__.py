"""The `quantize` command."""
