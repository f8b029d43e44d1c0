"""Intervals, tests, agreement, and what they say in words."""
