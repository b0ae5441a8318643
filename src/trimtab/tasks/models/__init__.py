"""Models of the built-in tasks: plain modules, torch only, nothing downloaded."""
