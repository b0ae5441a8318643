"""Runs kept on disk, and gone on with after whatever ended them."""
