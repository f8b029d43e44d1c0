"""Command lines, help and exit codes. This package does not load PyTorch; a command imports its work after its line is read."""
