"""The training run: applies a plan to a live model and optimizer, reversibly."""
