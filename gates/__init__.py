"""Gates, scores, masks and surgery for the attention heads of Hugging Face Transformers."""
