"""The Lightning module and what happens beside its training loop."""
