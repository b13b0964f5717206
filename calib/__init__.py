"""Calibration: text to token rows, a Hugging Face model held one decoder layer at a time, statistics, the layer loop."""
