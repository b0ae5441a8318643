"""The evaluation of the paper: tasks, slices, claims and goals."""
