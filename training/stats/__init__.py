"""Intervals, tests, agreement, and their summary in words."""
