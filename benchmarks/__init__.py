"""Measurements of trimtab, started as `python -m benchmarks.<folder>.<name>`, and their pages."""
