"""State of a training loop: finding everything that a step may change, snapshots of it, and their restoration."""
