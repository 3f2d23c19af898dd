"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from . import sharding as sharding
from .context import causal_conv1d, short_conv
from .fsdp import fully_shard
from .parallel import HyperParallel
from .pieces import shard_sequence, tail_bytes
from .traffic import MeshSizes, ModelSizes, traffic

__all__ = [
    "HyperParallel",
    "MeshSizes",
    "ModelSizes",
    "causal_conv1d",
    "fully_shard",
    "shard_sequence",
    "short_conv",
    "tail_bytes",
    "traffic",
]
