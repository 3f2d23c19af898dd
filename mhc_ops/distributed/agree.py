"""The message by which ranks compare what they are about to exchange: in every call, forward and backward.

A rank that takes part with another type, size or step does not fail by itself. If the byte counts are equal, it reads
rows as something they are not; if they differ, gloo ends the process and NCCL waits. An earlier answer says nothing
about this call. So each exchange begins with a message of fixed size, which is read before anything else is sent.

The message goes from host to host through a gloo group of its own. It does not wait for the GPU, does not use NCCL, and
cannot be confused with what a program sends in its own group. Within torch.compile it is an op of the graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.check import FLOATS, name_of

LAYOUTS = ("contiguous", "zigzag")
FUNCTIONS = ("causal_conv1d", "short_conv", "HyperParallel")
STEPS = ("the forward", "the backward", "the backward of final_state")
# A call as numbers. The fields in WORDS are an index into their words.
TYPES = [*(name_of(dtype) for dtype in FLOATS), "no float"]
WORDS = {"step": STEPS, "function": FUNCTIONS, "type": TYPES, "layout": LAYOUTS}
CHOICES = ("activation", "bias", "residual", "seq_idx", "cu_seqlens", "initial_state", "output_final_state")
FIELDS = ("number", "function", "step", "type", "is_cuda", "B", "L", "n", "D", "W", "dilation", "layout", *CHOICES)


class Statement(NamedTuple):
    """What this rank states about one call of a function, or about its backward. values: in the order of FIELDS"""

    group: dist.ProcessGroup
    values: tuple[int, ...]

    @classmethod
    def about(cls, function: str, group: dist.ProcessGroup, x: Tensor, **fields: int) -> "Statement":
        """fields: the other FIELDS that the function has; those that it does not have are 0"""
        known = {
            "function": FUNCTIONS.index(function),
            "type": FLOATS.index(x.dtype) if x.dtype in FLOATS else len(FLOATS),
            "is_cuda": int(x.is_cuda),
            **fields,
        }
        return cls(group, tuple([known.get(name, 0) for name in FIELDS]))

    @property
    def function(self) -> str:
        return FUNCTIONS[self.value("function")]

    def value(self, name: str) -> int:
        return self.values[FIELDS.index(name)]

    def backward(self, step: str = STEPS[1]) -> "Statement":
        return self._replace(values=(*self.values[:2], STEPS.index(step), *self.values[3:]))


def agreed(statement: Statement, like: Tensor) -> Tensor:
    """Compare the statements of all ranks: a ValueError on each if two differ, else an empty tensor [B, 0, ...].

    The empty tensor is typed as `like` [B, rows, ...] and is joined to what is sent, so that a compiler cannot send it
    before the ranks have agreed.
    """
    if torch.compiler.is_compiling():
        return _in_graph(like.detach(), list(statement.values), statement.group.group_name)
    _ask(statement)
    return like.detach()[:, :0]


@torch.library.custom_op("mhc_ops_distributed::agreed", mutates_args=())
def _in_graph(like: Tensor, values: Sequence[int], group_name: str) -> Tensor:
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    _ask(Statement(group, tuple(values)))
    return like.new_empty(like.shape[0], 0, *like.shape[2:])


@_in_graph.register_fake
def _(like: Tensor, values: Sequence[int], group_name: str) -> Tensor:
    return like.new_empty(like.shape[0], 0, *like.shape[2:])


torch.fx.node.has_side_effect(torch.ops.mhc_ops_distributed.agreed.default)  # the compiler may not drop it


_hosts: "WeakKeyDictionary[dist.ProcessGroup, Any]" = WeakKeyDictionary()  # the gloo group of each group
_numbers: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


def next_number(group: dist.ProcessGroup) -> int:
    """The number of the next call in the group, from 1. It shows a rank that an error kept from a call, and backwards
    that run in another order. In a graph it is 0, which matches any: a graph's values are the same in each run."""
    if torch.compiler.is_compiling():
        return 0
    _numbers[group] = _numbers.get(group, 0) + 1
    return _numbers[group]


def _ask(statement: Statement) -> None:
    group = statement.group
    mine = torch.tensor(statement.values, dtype=torch.int64).expand(group.size(), -1).contiguous()
    everyone = torch.empty_like(mine)
    try:
        if group not in _hosts:
            _hosts[group] = _between_hosts(group, torch.device("cuda" if statement.value("is_cuda") else "cpu"))
        _hosts[group].alltoall_base(everyone, mine, [], []).wait()  # one message to each rank, all at once
    except RuntimeError as error:
        step = STEPS[statement.value("step")]
        raise RuntimeError(
            f"{statement.function}: a rank of the group has ended, or has not come to {step} of this call in time: "
            "all ranks must make the same calls in the same order"
        ) from error
    if not torch.equal(mine, everyone):
        _compare(statement.function, everyone.tolist())


def _between_hosts(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroupGloo:
    """A gloo group with the store and the timeout of `group`. It is not made by dist.new_group, whose names depend on
    how many groups a process has made."""
    store = dist.PrefixStore("mhc_ops", dist.distributed_c10d._world.pg_map[group][1])
    timeout = group._get_backend(device).options._timeout
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def _compare(function: str, ranks: list[list[int]]) -> None:
    """Raise if the values of a rank differ from those of rank 0. The number 0 matches any (`next_number`)."""
    for rank, values in enumerate(ranks):
        pairs = {name: pair for name, *pair in zip(FIELDS, ranks[0], values) if pair[0] != pair[1]}
        if 0 in pairs.get("number", ()):
            del pairs["number"]
        if pairs:
            one, other = (", ".join(_said(name, pair[i]) for name, pair in pairs.items()) for i in range(2))
            help = ": pad the sequence" if [*pairs] == ["L"] else ", in the same order"
            raise ValueError(
                f"{function}: all ranks of the group must make the same call, "
                f"got {one} on rank 0 and {other} on rank {rank}{help}"
            )


def _said(name: str, value: int) -> str:
    if name in ("step", "function"):
        return WORDS[name][value]
    if name == "number":
        return f"call {value}"
    return f"{name} {WORDS[name][value] if name in WORDS else value}"
