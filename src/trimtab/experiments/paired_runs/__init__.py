"""Paired runs on a machine: training loops, interleaving and results folder."""
