"""What each attention head does: how often its largest weight falls where a role says, against baselines."""
