"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from .fsdp import fully_shard
from .pipeline import HyperStage, PipelineStage, boundary_bytes, pipeline_stages

__all__ = ["HyperStage", "PipelineStage", "boundary_bytes", "fully_shard", "pipeline_stages"]
