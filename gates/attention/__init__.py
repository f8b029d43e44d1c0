"""Find a model's attention modules, and observe or change them while the model runs."""
