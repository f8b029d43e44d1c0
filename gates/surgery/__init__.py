"""Heads physically removed."""
