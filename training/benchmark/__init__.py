"""What things cost: variants of one piece of work, measured in turn in one run, with goals that are met or missed."""
