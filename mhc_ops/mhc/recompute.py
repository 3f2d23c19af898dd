"""What the connections of a HyperStack hand to one another, and how x is left out of what autograd keeps.

x between two sublayers is x_next of `mhc_post`. In the backward it is made again from the x before it, h_out and the
maps, which are kept anyway, with the same bits; the layers do not run again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..core import backend as backends
from ..core.modes import watched
from .ops import Carry, mhc_enter, mhc_leave, mhc_next, mhc_post, mhc_read
from .reference import first_stream


class Unchanged:
    """A tensor that the backward reads. Autograd itself sees no changes of those that a hook keeps."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version

    def read(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "HyperStack: a tensor that the backward needs was changed in place behind the forward: "
                f"{list(self.tensor.shape)}, {self.tensor._version - self.version} times"
            )
        return self.tensor


class Remade:
    """An x that is not kept: the x before it, and what was written into that."""

    def __init__(self, before: "Tensor | Remade", carry: Carry, h_out: Tensor, backend: str | None):
        self.before, self.backend = Unchanged(before) if isinstance(before, Tensor) else before, backend
        kept = {"h_out": h_out, "h_post": carry.h_post, "h_res": carry.h_res}  # no h_res where streams stay as they are
        self.written = {name: Unchanged(tensor.detach()) for name, tensor in kept.items() if tensor is not None}
        self.transposed = carry.transposed
        self.choice = backends.chosen()  # autograd makes it again in a thread that has none of its own
        self.made: Tensor | None = None

    def x(self) -> Tensor:
        """Until `forget`: the backward of the boundary behind this x reads it first, that of its own boundary last, and
        between them all that was made on the way to it is needed too."""
        if self.made is None:
            before = self.before.x() if isinstance(self.before, Remade) else self.before.read()
            written: Any = {"h_res": None} | {name: tensor.read() for name, tensor in self.written.items()}
            with torch.no_grad(), backends.scope(self.choice):
                self.made = mhc_post(before, **written, transposed=self.transposed, backend=self.backend)
        return self.made

    def forget(self) -> None:
        self.made = None


class Recompute(NamedTuple):
    """every: how many boundaries have one x that is kept; number: of the boundary of this x; source: the x, or how it
    is made again"""

    every: int
    number: int
    x: Tensor
    source: Tensor | Remade

    def source_of(self, x: Tensor) -> Tensor | Remade:
        """A hook may have put another x into the carry: that one is kept."""
        return self.source if _same(x, self.x) else x.detach()


class StackCarry(NamedTuple):
    """What stands in the place of x between two connections of a `HyperStack`: the `Carry` of the sublayer that ended,
    and its h_out, which is still to be written. Before the first connection there is x alone and, where the stack is
    shifted, what it is read with, None for stream 0."""

    x: Tensor
    h_post: Tensor | None = None
    h_res: Tensor | None = None
    read: Tensor | None = None
    link: Tensor | None = None
    transposed: bool = False
    h_out: Any = None  # what a layer returned, checked where it is written
    recompute: Recompute | None = None
    shifted: bool = False
    leaving: Any = None  # of the last connection of a pipeline's stage: called when its maps are made, before its layer


def begin(x: Tensor, every: int, shifted: bool = False, read: Tensor | None = None) -> StackCarry:
    """every: keep x of every so many boundaries for the backward; 0 and 1 keep all. shifted, read: of mhc_enter"""
    recompute = Recompute(every, 0, x, x) if every > 1 else None
    return StackCarry(x, read=read, recompute=recompute, shifted=shifted)


def boundary(before: StackCarry, *parameters: Any, backend: str | None, **own: Any) -> tuple[Tensor, StackCarry]:
    """h_in of the next sublayer and its carry, in which h_out is still to be set. parameters, own: of that sublayer"""
    recompute = before.recompute
    if before.h_post is None:
        if before.shifted:
            own |= {"shifted": True, "read": before.read}
        h_in, carry = mhc_enter(before.x, *parameters, backend=backend, **own)
        return h_in, StackCarry(*carry, recompute=recompute and _kept_at(recompute.every, 0, carry.x))
    ended = _ended(before)
    if recompute is None or watched():
        h_in, carry = mhc_next(ended, before.h_out, *parameters, backend=backend, **own)
        return h_in, StackCarry(*carry)
    every, number, source = recompute.every, recompute.number, recompute.source_of(ended.x)
    with _Kept() as kept:
        h_in, carry = mhc_next(ended, before.h_out, *parameters, backend=backend, **own)
    after = _kept_at(every, number + 1, carry.x)
    if kept.may_leave_out and after.number % every:
        after = after._replace(source=Remade(source, ended, before.h_out, backend))
    kept.leave_out(ended.x, source, last=False)
    kept.leave_out(carry.x, after.source, last=True)
    return h_in, StackCarry(*carry, recompute=after)


def _kept_at(every: int, number: int, x: Tensor) -> Recompute:
    return Recompute(every, number, x.detach(), x.detach())


def end(before: StackCarry, backend: str | None, contracted: bool = False) -> Any:
    """x behind the last sublayer; shifted, x and what a next one would read it with, or both contracted."""
    ended = _left(before, backend) if before.h_post is not None else _nothing_ran(before)
    return mhc_read(*ended, backend=backend) if contracted else ended


def _left(before: StackCarry, backend: str | None) -> Any:
    ended, recompute = _ended(before), before.recompute
    if recompute is None or watched():
        return mhc_leave(ended, before.h_out, backend=backend)
    with _Kept() as kept:
        left = mhc_leave(ended, before.h_out, backend=backend)
    kept.leave_out(ended.x, recompute.source_of(ended.x), last=False)
    return left


def _nothing_ran(before: StackCarry) -> Any:
    """Of a stack without connections."""
    if not before.shifted:
        return before.x
    return before.x, first_stream(before.x) if before.read is None else before.read


def _ended(carry: StackCarry) -> Carry:
    assert carry.h_post is not None
    return Carry(carry.x, carry.h_post, carry.h_res, carry.read, carry.link, carry.transposed)


class _Slot:
    """What autograd keeps in the place of a tensor."""

    def __init__(self, tensor: Tensor):
        self.kept: Unchanged | None = Unchanged(tensor)
        self.remade: Remade | None = None
        self.last = False  # of the two that read this x in the backward

    def unpacked(self) -> Tensor:
        if self.remade is None:
            assert self.kept is not None
            return self.kept.read()
        x = self.remade.x()
        if self.last:
            self.remade.forget()
        return x


class _Kept:
    """Sees what autograd keeps within it, unless others do already, as a checkpoint does."""

    def __init__(self) -> None:
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        self.may_leave_out = torch.is_grad_enabled() and refused is None and not others
        self.slots: list[_Slot] = []

    def pack(self, tensor: Tensor) -> _Slot:
        self.slots.append(_Slot(tensor))
        return self.slots[-1]

    def __enter__(self) -> "_Kept":
        if self.may_leave_out:
            self.hooks = saved_tensors_hooks(self.pack, _Slot.unpacked)
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.may_leave_out:
            self.hooks.__exit__(*error)
            del self.hooks  # a cycle with it would keep all slots until Python looks for cycles

    def leave_out(self, x: Tensor, source: Tensor | Remade, last: bool) -> None:
        """Keep how x is made again, where it is, in the place of x."""
        if isinstance(source, Remade):
            for slot in self.slots:
                if slot.kept is not None and _same(slot.kept.tensor, x):
                    slot.kept, slot.remade, slot.last = None, source, last


def _same(one: Tensor, other: Tensor) -> bool:
    """The same memory, seen in the same way: autograd keeps outputs as tensors of their own. That of a DTensor is its
    piece's."""
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.is_neg() == other.is_neg()
    )
