"""Planning: from a profile to a plan, by pure functions of the standard library."""
