"""How exports load, what runs them, and how fast."""
