"""How commands begin and end. Nothing here loads PyTorch: what a command works with is imported once its line is read."""
