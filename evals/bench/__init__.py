"""Serving measured: loads, targets, latencies, comparisons, memory and the roofline."""
