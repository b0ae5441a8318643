"""Adapters for trainers, trackers and web services of other projects. No other package imports this one."""
