"""A loop on 1, 2, 4 ranks: jobs, rounds and the table of what they keep."""
