"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from . import sharding as sharding
from .bytes_sent import MeshSizes, ModelSizes, traffic
from .context_parallel import causal_conv1d, short_conv
from .fsdp import fully_shard
from .parallel import HyperParallel
from .pipeline import PipelineStage
from .row_exchange import shard_sequence, tail_bytes
from .stages import HyperStage, boundary_bytes, pipeline_stages

__all__ = [
    "HyperParallel",
    "HyperStage",
    "MeshSizes",
    "ModelSizes",
    "PipelineStage",
    "boundary_bytes",
    "causal_conv1d",
    "fully_shard",
    "pipeline_stages",
    "shard_sequence",
    "short_conv",
    "tail_bytes",
    "traffic",
]
