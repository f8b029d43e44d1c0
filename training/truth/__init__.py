"""Transformers whose necessary attention heads are known, because they are compiled from programs."""
