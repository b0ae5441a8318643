"""Settings that a plan can change: the code that applies each of them to a live model and undoes it."""
