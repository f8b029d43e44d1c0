"""Kept weights adjusted in closed form, without training."""
