"""Adjust kept weights in closed form, without training."""
