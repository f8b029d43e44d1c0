"""Where a run writes, what it logs, what it costs, how it shows its progress."""
