"""Score the importance of heads by methods from the literature, and rank heads by these scores."""
