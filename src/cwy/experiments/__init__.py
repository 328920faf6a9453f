"""Experiments: thin recipes over the library. Nothing in the library imports them."""
