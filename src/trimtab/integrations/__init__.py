"""What adapts other people's trainers, packages and services; nothing below this layer knows of them."""
