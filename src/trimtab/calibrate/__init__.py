"""TRY: runs candidate settings on the user's own loop, through the same run that would train, and puts all back."""
