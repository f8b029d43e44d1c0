"""What is read from, or put into, a running model."""
