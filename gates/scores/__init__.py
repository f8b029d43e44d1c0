"""Numbers per head that say how much it matters, each with its source, and the rankings they induce."""
