"""What adapts other people's packages and services; nothing below this layer knows of them."""
