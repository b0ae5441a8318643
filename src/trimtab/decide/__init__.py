"""CHOOSE: pure arithmetic on core values. No torch, no clock, no randomness; milliseconds."""
