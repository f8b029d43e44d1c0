"""Pruned models on disk: save, verify, reload; stock shapes; ONNX; what they cost."""
