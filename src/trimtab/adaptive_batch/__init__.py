"""Adaptive batch size: gradient noise scale, the model of the step time, and the decisions based on both."""
