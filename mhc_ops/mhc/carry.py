"""What the connections of a HyperStack hand to one another, and the three steps that make it: begin, boundary, end."""

from typing import Any, NamedTuple

from torch import Tensor

from ..core.modes import watched
from .ops import Carry, mhc_enter, mhc_leave, mhc_next, mhc_read
from .recompute import Recompute, Remade, SavedTensors
from .reference import first_stream


class Start(NamedTuple):
    """What the first connection reads: x and, in a shifted stack, the weights to read it with, None for stream 0."""

    x: Tensor
    shifted: bool = False
    read: Tensor | None = None


WHERE_HOOKS_GO = (
    "hooks that take tensors go on the layer of a connection, or on the connections of nn.Sequential(*stack); "
    "a hook on a connection of the stack has x as carry.x"
)


class StackCarry(NamedTuple):
    """What stands in the place of x between two connections of a `HyperStack`.

    carry: of the sublayer that ended; a `Start` before the first connection   h_out: what that sublayer returned, to
    be checked and written by the next connection   leaving: a function that the last connection of a pipeline
    stage calls when its maps are made, before its layer runs
    """

    carry: Carry | Start
    h_out: Any = None
    recompute: Recompute | None = None
    leaving: Any = None

    @property
    def x(self) -> Tensor:
        """x as the connection read it, for hooks."""
        return self.carry.x

    def after(self, h_out: Any) -> "StackCarry":
        """With what the sublayer returned."""
        return StackCarry(self.carry, h_out, self.recompute, self.leaving)

    def __getattr__(self, name: str) -> Any:
        """A hook that takes a carry for a tensor is told where it belongs."""
        raise AttributeError(f"a carry of a HyperStack has no {name}; {WHERE_HOOKS_GO}")


def begin(x: Tensor, every: int, shifted: bool = False, read: Tensor | None = None) -> StackCarry:
    """every: keep x of every so many boundaries for the backward; 0 and 1 keep all. shifted, read: as in mhc_enter"""
    return StackCarry(Start(x, shifted, read), recompute=_first(every, x))


def resume(carry: Carry, h_out: Tensor, every: int) -> StackCarry:
    """In the middle of a stack, with the carry and h_out of the sublayer before."""
    return StackCarry(carry, h_out, _first(every, carry.x))


def _first(every: int, x: Tensor) -> Recompute | None:
    return Recompute(every, 0, x, x) if every > 1 else None


def boundary(before: StackCarry, *parameters: Any, backend: str | None, **own: Any) -> tuple[Tensor, StackCarry]:
    """h_in of the next sublayer and its carry, whose h_out is not set yet. parameters, own: of that sublayer"""
    ended, recompute = before.carry, before.recompute
    if isinstance(ended, Start):
        if ended.shifted:
            own |= {"shifted": True, "read": ended.read}
        h_in, carry = mhc_enter(ended.x, *parameters, backend=backend, **own)
        return h_in, StackCarry(carry, recompute=recompute and Recompute.kept(recompute.every, 0, carry.x))
    if recompute is None or watched():
        h_in, carry = mhc_next(ended, before.h_out, *parameters, backend=backend, **own)
        return h_in, StackCarry(carry)
    every, number, source = recompute.every, recompute.number, recompute.source_of(ended.x)
    with SavedTensors() as saved:
        h_in, carry = mhc_next(ended, before.h_out, *parameters, backend=backend, **own)
    after = Recompute.kept(every, number + 1, carry.x)
    if saved.may_leave_out and after.number % every:
        after = after._replace(source=Remade(source, ended, before.h_out, backend))
    saved.leave_out(ended.x, source, last=False)
    saved.leave_out(carry.x, after.source, last=True)
    return h_in, StackCarry(carry, recompute=after)


def end(before: StackCarry, backend: str | None, contracted: bool = False) -> Any:
    """x after the last sublayer; of a shifted stack (x, p), or both contracted to mhc_read(x, p)."""
    ended = _nothing_ran(before.carry) if isinstance(before.carry, Start) else _left(before, before.carry, backend)
    return mhc_read(*ended, backend=backend) if contracted else ended


def _left(before: StackCarry, ended: Carry, backend: str | None) -> Any:
    recompute = before.recompute
    if recompute is None or watched():
        return mhc_leave(ended, before.h_out, backend=backend)
    with SavedTensors() as saved:
        left = mhc_leave(ended, before.h_out, backend=backend)
    saved.leave_out(ended.x, recompute.source_of(ended.x), last=False)
    return left


def _nothing_ran(start: Start) -> Any:
    """A stack without connections returns its input."""
    if not start.shifted:
        return start.x
    return start.x, first_stream(start.x) if start.read is None else start.read
