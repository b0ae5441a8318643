"""Scaling of a loop over 1, 2, 4, ... ranks: jobs, rounds and result table."""
