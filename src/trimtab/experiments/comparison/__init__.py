"""Paired comparison: runs, statistics and verdict."""
