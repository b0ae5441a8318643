"""Training on several ranks: process groups, sharding backends and collectives."""
