"""Experiments: paired comparisons, ablations, scaling, statistics and reports."""
