"""How x is left out of what autograd keeps, by hooks on the tensors that it saves.

x between two sublayers is x_next of `mhc_post`. In the backward it is made again from the x before it, h_out and the
maps, which are kept anyway, with the same bits; the layers do not run again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..core import backend as backends
from ..core import private
from .ops import Carry, mhc_post


class Unchanged:
    """A tensor that the backward reads. Autograd does not check the version of a tensor that a hook keeps."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version

    def read(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "HyperStack: a tensor that the backward needs was modified in place after the forward: "
                f"{list(self.tensor.shape)}, {self.tensor._version - self.version} times"
            )
        return self.tensor


class Remade:
    """An x that is not kept: the x before it, and what was written into that."""

    def __init__(self, before: "Tensor | Remade", carry: Carry, h_out: Tensor, backend: str | None):
        self.before, self.backend = Unchanged(before) if isinstance(before, Tensor) else before, backend
        kept = {"h_out": h_out, "h_post": carry.h_post, "h_res": carry.h_res}  # h_res is None with the identity
        self.written = {name: Unchanged(tensor.detach()) for name, tensor in kept.items() if tensor is not None}
        self.transposed = carry.transposed
        self.choice = backends.chosen()  # autograd makes x again in a thread without this context
        self.made: Tensor | None = None

    def x(self) -> Tensor:
        """x, made once and held until `forget`: two boundaries read it, the one after it first and its own last. All
        x that are made on the way to it are needed between the two."""
        if self.made is None:
            before = self.before.x() if isinstance(self.before, Remade) else self.before.read()
            written: Any = {"h_res": None} | {name: tensor.read() for name, tensor in self.written.items()}
            with torch.no_grad(), backends.scope(self.choice):
                self.made = mhc_post(before, **written, transposed=self.transposed, backend=self.backend)
        return self.made

    def forget(self) -> None:
        self.made = None


class Recompute(NamedTuple):
    """every: x of every so many boundaries is kept   number: the boundary of this x   source: x, or how to make it"""

    every: int
    number: int
    x: Tensor
    source: Tensor | Remade

    @staticmethod
    def kept(every: int, number: int, x: Tensor) -> "Recompute":
        """At a boundary whose x is kept."""
        return Recompute(every, number, x.detach(), x.detach())

    def source_of(self, x: Tensor) -> Tensor | Remade:
        """A hook may have put another x into the carry: that one is kept."""
        return self.source if _same(x, self.x) else x.detach()


class _Slot:
    """What autograd keeps in the place of a tensor."""

    def __init__(self, tensor: Tensor):
        self.kept: Unchanged | None = Unchanged(tensor)
        self.remade: Remade | None = None
        self.last = False  # of the two boundaries that read this x in the backward

    def unpacked(self) -> Tensor:
        if self.remade is None:
            assert self.kept is not None
            return self.kept.read()
        x = self.remade.x()
        if self.last:
            self.remade.forget()
        return x


class SavedTensors:
    """Context that sees what autograd saves within it, unless other hooks do already, as a checkpoint's."""

    def __init__(self) -> None:
        others = private.saved_tensors_hooks_on_top(True)
        refused = private.why_no_hooks()
        self.may_leave_out = torch.is_grad_enabled() and refused is None and not others
        self.slots: list[_Slot] = []

    def pack(self, tensor: Tensor) -> _Slot:
        self.slots.append(_Slot(tensor))
        return self.slots[-1]

    def __enter__(self) -> "SavedTensors":
        if self.may_leave_out:
            self.hooks = saved_tensors_hooks(self.pack, _Slot.unpacked)
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.may_leave_out:
            self.hooks.__exit__(*error)
            del self.hooks  # a cycle with it would keep all slots until Python looks for cycles

    def leave_out(self, x: Tensor, source: Tensor | Remade, last: bool) -> None:
        """Keep `source` in the place of x, where it says how to make x again."""
        if isinstance(source, Remade):
            for slot in self.slots:
                if slot.kept is not None and _same(slot.kept.tensor, x):
                    slot.kept, slot.remade, slot.last = None, source, last


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same view of the same memory: autograd keeps outputs as tensors of their own. A DTensor is
    compared by its local tensor."""
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.is_neg() == other.is_neg()
    )
