"""The training run: windows, micro-batches, backward, optimizer step, and what happens around them."""
