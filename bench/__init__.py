"""Measurements of whole training iterations; nothing in the package imports this."""
