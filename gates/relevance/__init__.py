"""Attribute a model's predictions to its heads by layer-wise relevance propagation."""
