"""Carbon intensity of the grid: forecasts, and pauses of training when the grid is dirty."""
