"""The contents of a checkpoint of examples/train_distributed.py."""

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def checkpoint(folder, step):
    """Its tensors and numbers by name, flat."""
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:09d}", folder / "last.pt")
    return dict(_flat(torch.load(folder / "last.pt", weights_only=False), ""))


def _flat(value, name):
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{name}/{key}")
    else:
        yield name, value


def different(one, other):
    """The names whose values do not have the same bits in both."""
    return sorted(one.keys() ^ other.keys()) + [
        name for name in one.keys() & other if not _same(one[name], other[name])
    ]


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
