"""A stack of hyper-connections that runs the boundary between two of them as one operation."""

from typing import Any

from torch import Tensor, nn

from ..core.check import check_flag
from . import carry as between
from .carry import StackCarry
from .modules import HyperConnection
from .ops import Carry


class HyperStack(nn.Sequential):
    """The layers of a model with n residual streams: `x = HyperStack(*connections)(x)` for x [..., n, D].

    An nn.Sequential of `HyperConnection`s, all with one n and one D: the same keys in its state, the same values, bit
    for bit. Between two connections the output of one is written back and the input of the next is read in one
    operation (`mhc_next`), forward and backward.

    `forward(x, /, *args, **kwargs)` passes the extras on to every layer. Where a layer returns a tuple, the rest
    after h_out is collected: (x, [rest of each layer]), each rest a tuple, () where a layer returns h_out alone.

    >>> stack = HyperStack(*(HyperConnection(nn.Linear(64, 64), 4, 64, layer_norm=True) for _ in range(6)))
    >>> x = stack(mhc_expand(torch.randn(2, 10, 64), 4))

    Every connection runs through its own call, so its hooks run. They see a carry where those of an nn.Sequential see
    x; `carry.x` is x as the connection read it, and a backward hook sees the gradient of h_out. Hooks that take tensors
    go on `connection.layer`, where they see what they would in an nn.Sequential. For x and its gradients between
    connections, call `nn.Sequential(*stack)`: the same connections and results, but for shifted stacks.

    recompute: with k > 1 only x of every k-th boundary is kept for the backward. The others are made again there from
    h_out and the maps, up to k − 1 at a time, with the same bits and without running the layers again. All x are kept
    under torch.compile, torch.func or a mode; inside a checkpoint or other hooks on saved tensors, which decide that
    themselves; and by the reference, which keeps x in other forms.

    shifted: every sublayer reads with the weights h_pre of the one before, the first stream 0 alone, and the streams
    are contracted with those of the last: x [..., n, D] becomes [..., D], and no head is needed (DeepSeek V4.1; its
    connections also have norm_eps=1e-20). The stages of a pipeline hand x and these weights
    p [..., n] on: a stack with last=False returns (x, p), one with first=False takes that pair, or its two parts as two
    arguments. Slices of a shifted stack are such stages: `stack[2:](stack[:2](x))` is `stack(x)`.
    """

    def __init__(
        self, *connections: Any, recompute: int = 0, shifted: bool = False, first: bool = True, last: bool = True
    ):
        if not isinstance(recompute, int) or isinstance(recompute, bool):
            raise TypeError(f"HyperStack: recompute must be an int, got {type(recompute).__name__}")
        if recompute < 0:
            raise ValueError(f"HyperStack: recompute must be 0 or more, got {recompute}")
        for name, value in (("shifted", shifted), ("first", first), ("last", last)):
            check_flag("HyperStack", name, value)
        if not shifted and not (first and last):
            raise ValueError(f"HyperStack: {'last' if first else 'first'}=False has no meaning without shifted=True")
        super().__init__(*connections)
        self.recompute, self.shifted, self.first, self.last = recompute, shifted, first, last

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """nn.Sequential calls it for every connection, except in insert and stack[i] = connection."""
        self._check(name, module)
        super().add_module(name, module)

    def insert(self, index: int, module: nn.Module) -> "HyperStack":
        self._check(str(index), module)
        super().insert(index, module)
        return self

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self._check(str(index), module)
        super().__setitem__(index, module)

    def __add__(self, other: nn.Sequential) -> "HyperStack":
        if isinstance(other, HyperStack) and other.shifted != self.shifted:
            raise ValueError("HyperStack: a shifted stack and one that is not cannot be joined")
        last = other.last if isinstance(other, HyperStack) else self.last
        return HyperStack(*super().__add__(other), **{**self._settings(), "last": last})

    def __mul__(self, other: int) -> "HyperStack":
        return HyperStack(*super().__mul__(other), **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"recompute": self.recompute, "shifted": self.shifted, "first": self.first, "last": self.last}

    def _check(self, name: str, module: nn.Module | None) -> None:
        if not isinstance(module, HyperConnection):
            kind = type(module).__name__
            raise TypeError(f"HyperStack: connection {name} must be a HyperConnection, got {kind}")
        for first, other in self._modules.items():
            assert isinstance(other, HyperConnection)
            if (module.n, module.D) != (other.n, other.D):
                sizes = f"n={module.n}, D={module.D}, but connection {first} has n={other.n}, D={other.D}"
                raise ValueError(f"HyperStack: connection {name} has {sizes}")

    def __getitem__(self, index: Any) -> Any:
        """A connection, or a stack of some of them."""
        found: Any = super().__getitem__(index)
        if isinstance(index, slice):
            found.recompute, found.shifted = self.recompute, self.shifted
            span = range(len(self))[index]
            if self.shifted:
                found.first, found.last = self.first and span.start == 0, self.last and span.stop == len(self)
        return found

    def forward(self, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        read = None
        if not self.first:
            (x, read), args = self._pair(x, *args)
        carry, rests, any_rest = between.begin(x, self.recompute, self.shifted, read), [], False
        connection: nn.Module | None = None
        for name, connection in self._modules.items():
            result = connection(carry, *args, **kwargs)
            carry, rest = split(name, result)
            rests.append(rest or ())
            any_rest = any_rest or rest is not None
        out = between.end(carry, getattr(connection, "backend", None), contracted=self.shifted and self.last)
        return (out, rests) if any_rest else out

    @staticmethod
    def _pair(*args: Any) -> tuple[Any, Any]:
        """(x, p), given as a pair or as its two parts, and the extras."""
        if isinstance(args[0], tuple):
            args = (*args[0], *args[1:])
        if len(args) < 2 or not isinstance(args[1], Tensor):
            got = ", ".join(type(argument).__name__ for argument in args[:2])
            raise TypeError(f"HyperStack: with first=False the input must be (x, p), got {got}")
        return args[:2], args[2:]

    def extra_repr(self) -> str:
        settings = self._settings()
        shown = [name for name in ("recompute", "shifted") if settings[name]]
        shown += [name for name in ("first", "last") if not settings[name]]
        return ", ".join(f"{name}={settings[name]}" for name in shown)


def split(name: str, result: Any) -> tuple[StackCarry, tuple[Any, ...] | None]:
    """The carry, and the rest where the layer returned a tuple."""
    if isinstance(result, StackCarry):
        return result, None
    if isinstance(result, tuple) and result and isinstance(result[0], StackCarry):
        return result[0], result[1:]
    if isinstance(result, tuple) and len(result) == len(StackCarry._fields) and isinstance(result[0], Carry):
        return StackCarry._make(result), None  # torch's backward hooks make a plain tuple of a named one
    got = f"got {type(result).__name__} (of a hook?)"
    raise TypeError(f"HyperStack: connection {name} must return its carry, {got}; {between.WHERE_HOOKS_GO}")
