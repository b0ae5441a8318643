"""Adapters for trainers, experiment trackers and web services, used by the command line and experiments only."""
