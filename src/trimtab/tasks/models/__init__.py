"""Models of the built-in tasks, in plain torch."""
