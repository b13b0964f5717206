"""Checkpoint layouts: write, read, inspect."""
