"""COMMUNICATE: the only layer that calls collectives."""
