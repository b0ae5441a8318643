"""What adapts other people's trainers, packages and services; no layer below this one knows of them."""
