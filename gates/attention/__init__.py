"""What a model's attention is made of, and what is read from or put into it while it runs."""
