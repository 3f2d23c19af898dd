"""Record what a process sends: `with Sending() as sending: …`, then `sending.sent` or `sending.bytes`."""

from collections import Counter
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(NamedTuple):
    """One communication. how: the collective   bytes: what this process sends in it, as a ring does"""

    how: str
    bytes: int
    shapes: list


class Sending(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sent = []

    @property
    def bytes(self):
        """Their sums by collective."""
        found = Counter()
        for one in self.sent:
            found[one.how] += one.bytes
        return found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again as operations on the tensors inside
        space, _, name = function._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd", "recv_"):
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.sent.append(Sent(*_counted(name, args), [tensor.shape for tensor in tensors]))
        return function(*args, **(kwargs or {}))


def _counted(name, args):
    if name == "_allgather_base_":
        return "all-gather", args[0].nbytes - args[1].nbytes
    if name == "all_gather_into_tensor":
        return "all-gather", (args[1] - 1) * args[0].nbytes
    if name == "_reduce_scatter_base_":
        return "reduce-scatter", args[1].nbytes - args[0].nbytes
    if name == "reduce_scatter_tensor":
        return "reduce-scatter", args[0].nbytes - args[0].nbytes // args[2]
    if name == "allreduce_":
        world = dist.ProcessGroup.unbox(args[1]).size()
        return "all-reduce", sum(_all_reduced(tensor, world) for tensor in args[0])
    if name == "all_reduce":
        return "all-reduce", _all_reduced(args[0], _group(args[2]).size())
    if name == "all_to_all_single":
        rows, _, given, group = args
        own = given[_group(group).rank()]
        return "all-to-all", rows.nbytes // max(1, sum(given)) * (sum(given) - own)
    if name == "send":  # to a later stage, or back
        ahead = args[2] > dist.ProcessGroup.unbox(args[1]).rank()
        return "send" if ahead else "send back", sum(tensor.nbytes for tensor in args[0])
    raise AssertionError(f"{name} is not counted")


def _all_reduced(tensor, world):
    return -(-2 * (world - 1) * tensor.nbytes // world)


_group = dist.distributed_c10d._resolve_process_group
