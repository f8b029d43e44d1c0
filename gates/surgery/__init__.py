"""Remove heads physically."""
