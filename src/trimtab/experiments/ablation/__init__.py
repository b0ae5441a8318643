"""Each change of a plan alone and without it: races, effects with intervals, and their table."""
