"""The paper's evaluation: what runs of every kind show, beside what the paper states."""
