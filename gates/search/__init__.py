"""Search for a better mask within its budget."""
