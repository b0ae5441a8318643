"""Arms that train side by side on one machine: their loops, their turns, and the folder that they leave."""
