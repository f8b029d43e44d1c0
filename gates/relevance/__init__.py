"""Layer-wise relevance propagation: how much of a model's answer comes from each head."""
