"""Frozen dataclasses and their JSON; standard library only, imports nothing else of trimtab."""
