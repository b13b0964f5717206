"""Calibration: text to token rows, a model held one decoder layer at a time, the layer loop."""
