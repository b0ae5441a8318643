"""NARRATE: paired comparisons, their statistics, and the report."""
