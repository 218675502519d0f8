"""Measurements. Each module is a command, run from the checkout: `python -m benchmarks.mla_cpu`."""
