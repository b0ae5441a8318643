"""A paired comparison: its races, its figures with their statistics, and its verdict."""
