"""Measurements: perplexity, divergence from the base model, speed, reports."""
