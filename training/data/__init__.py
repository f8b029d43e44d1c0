"""Data modules, one per kind of input."""
