"""Values: frozen dataclasses and their JSON, standard library only. Imports nothing of trimtab above it."""
