"""Learned gates, their price, their budget and its schedule."""
