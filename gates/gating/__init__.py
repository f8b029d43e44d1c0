"""The gates: how they are learned, what they cost, how many stay open, and the schedule of training."""
