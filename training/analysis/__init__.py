"""Michel et al.'s further experiments on a trained model."""
