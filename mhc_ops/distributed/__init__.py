"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from .fsdp import fully_shard

__all__ = ["fully_shard"]
