"""Measurements of a training loop. A measurement may run the model, and restores its state exactly."""
