"""Training techniques: code that changes a live model, optimizer or process, and undoes the change."""
