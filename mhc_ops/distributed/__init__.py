"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from .context import causal_conv1d, short_conv
from .fsdp import fully_shard
from .pieces import shard_sequence, tail_bytes

__all__ = ["causal_conv1d", "fully_shard", "shard_sequence", "short_conv", "tail_bytes"]
