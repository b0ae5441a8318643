"""Hand-written baselines for comparison with a plan: plain torch without trimtab's runtime. Each file is executable."""
