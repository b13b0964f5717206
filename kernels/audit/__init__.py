"""Holds every shipped kernel to its bars without a GPU: compiles, reads code, counts bytes."""
