"""Sweeps in W&B's format, run locally through Optuna."""
