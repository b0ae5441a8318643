"""Checkpoints on disk, and resuming from them after an interruption."""
