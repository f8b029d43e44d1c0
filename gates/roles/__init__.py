"""Find the role of each attention head: the share of its largest weights in the place of a role, against baselines."""
