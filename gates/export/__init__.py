"""Save, verify and reload pruned models, export them to stock classes and ONNX, and measure their cost."""
