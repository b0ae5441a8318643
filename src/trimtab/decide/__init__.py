"""Decisions as pure arithmetic on core values: no torch, no clock, no randomness; milliseconds."""
