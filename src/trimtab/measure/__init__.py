"""OBSERVE: may run the model, and leaves it exactly as found."""
