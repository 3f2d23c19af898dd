"""Training on many machines, by torch.distributed: docs/distributed.md. `import mhc_ops` does not import this."""

from . import sharding as sharding
from .parallel import HyperParallel as HyperParallel
