"""Files written by `trimtab init`, for every kind of training loop. All run unchanged, on small generated data."""
