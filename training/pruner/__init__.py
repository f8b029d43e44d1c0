"""The Lightning module and the callbacks of its training."""
