"""Methods compared at the same budget and cost."""
