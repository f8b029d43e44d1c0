"""What works for which architecture."""
