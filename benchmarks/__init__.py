"""Measurements, run by hand: each writes one file to `benchmarks/results/` and prints its headline last."""
