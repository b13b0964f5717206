"""The bins of a histogram of divergences, which is counted with torch and drawn without."""

from __future__ import annotations

KLD_EDGES = tuple(10 ** (k / 2) for k in range(-12, 4))
"""Nats: two bins a decade; one more is below the first edge and one from the last on."""
