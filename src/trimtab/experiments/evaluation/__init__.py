"""Evaluation of the paper: results of all kinds of runs next to the paper's statements."""
