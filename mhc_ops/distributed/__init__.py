"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""
