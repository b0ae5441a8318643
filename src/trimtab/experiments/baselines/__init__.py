"""Baselines of paired runs as plain torch loops: the unchanged loop, alone or in DDP, and hand-tuned recipes."""
