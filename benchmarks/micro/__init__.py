"""Measurements of single properties: overheads, accuracy of predictions, memory, scaling and faults."""
