"""What an op is: contracts, backends, checks. Knows no family."""
