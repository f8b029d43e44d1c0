"""What gates, scores and pruned models cost: variants timed in turn, the tables and the goals."""
