"""Files that `trimtab init` writes, one per kind of training loop. Each runs unchanged, on small data made up in it."""
