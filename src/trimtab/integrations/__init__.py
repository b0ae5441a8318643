"""ADAPT: one file per host or service outside of this house, which nothing below needs."""
