"""Profiling: measures the candidates on the training loop of the user and proves that they train equally."""
