"""Trials of candidate settings on the user's own loop, through the same run that would train; state is restored."""
