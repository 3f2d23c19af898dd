"""Channel-last causal conv1d."""
