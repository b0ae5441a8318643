"""Values of planning, read and written as JSON: candidates, profiles and plans."""
