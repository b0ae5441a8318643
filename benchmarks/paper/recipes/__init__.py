"""The paper's recipe (P1), and a command that trains a task by any recipe."""
