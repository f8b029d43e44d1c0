"""How gates are learned: each family is a distribution or a function of one number per head."""
