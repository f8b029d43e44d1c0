"""Heads scored and masks searched with a task's data."""
