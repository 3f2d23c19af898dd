"""The convolution one token and one tap at a time, and the cases that its reference is held to it on."""

from dataclasses import dataclass
from itertools import pairwise

import torch

import mhc_ops


def conv(*tensors, **options):
    return mhc_ops.causal_conv1d(*tensors, **options, backend="reference")


@dataclass(frozen=True)
class Case:
    B: int = 2
    L: int = 9
    D: int = 5
    W: int = 4
    dilation: int = 1
    bias: bool = True
    activation: str | None = "silu"
    residual: bool = False
    state: bool = False
    ids: tuple[tuple[int, ...], ...] | None = None
    cu: tuple[int, ...] | None = None

    def inputs(self, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        B, L, D, N = self.B, self.L, self.D, self.B if self.cu is None else len(self.cu) - 1
        tensors = {"x": normal(B, L, D), "weight": normal(D, self.W)}
        tensors |= {"bias": normal(D)} if self.bias else {}
        tensors |= {"residual": normal(B, L, D)} if self.residual else {}
        return tensors | ({"initial_state": normal(N, D, (self.W - 1) * self.dilation)} if self.state else {})

    def options(self):
        places = {"seq_idx": self.ids, "cu_seqlens": self.cu}
        tensors = {name: torch.tensor(ids, dtype=torch.int32) for name, ids in places.items() if ids is not None}
        return {"activation": self.activation, "dilation": self.dilation, **tensors}

    def __str__(self):
        differs = {name: value for name, value in vars(self).items() if value != getattr(Case, name)}
        return " ".join(f"{name}={value}".replace(" ", "") for name, value in differs.items()) or "plain"


IDS = ((0, 0, 0, 1, 1, -1, 2, 2, 2), (-1, -1, 3, 3, 0, 0, 3, 3, -1))  # 3 comes back: its taps reach over 0
RETURNS = ((0, 1, 0, 0, -1, 2, 2, 0, 0), (5, 5, -1, 3, 3, 5, 5, 5, 5))  # to the sequence of token 0, whose state it is
PADDED = (0, 4, 4, 5, 7)  # one empty, one of a single token, tokens past the end
CASES = [
    *(Case(W=W, state=True) for W in range(1, 9)),
    *(Case(bias=bias, activation=activation) for bias in (False, True) for activation in (None, "silu", "swish")),
    *(Case(dilation=dilation, residual=True, state=True) for dilation in (2, 3, 7)),
    Case(residual=True),
    *(Case(L=L, state=state) for L in (0, 1, 2) for state in (False, True)),
    Case(L=2, W=3, dilation=4, state=True),
    *(Case(B=B, L=L, D=D, state=True) for B, L, D in ((0, 9, 5), (1, 9, 1), (2, 9, 0), (0, 0, 1))),
    *(Case(ids=IDS, dilation=dilation, residual=residual) for dilation in (1, 2) for residual in (False, True)),
    Case(ids=IDS, bias=False, activation=None, W=1),
    *(Case(ids=RETURNS, state=True, W=W, dilation=dilation, residual=True) for W in (1, 3, 8) for dilation in (1, 2)),
    Case(ids=IDS, state=True, bias=False, activation=None),
    Case(ids=((4,), (-1,)), L=1, state=True),
    Case(ids=((), ()), L=0, state=True),
    Case(ids=((), ()), L=0),
    *(Case(B=1, cu=PADDED, state=state, residual=state, W=W) for state in (False, True) for W in (1, 3, 8)),
    Case(B=1, cu=PADDED, state=True, dilation=2, bias=False, activation=None),
    Case(B=1, cu=(2, 5, 9), state=True),
    Case(B=1, cu=(0,), state=True),
    Case(B=1, L=0, cu=(0, 0, 0), state=True),
    Case(B=1, D=1, cu=(0, 0, 9), state=True),
]


def loop(
    x, weight, bias=None, residual=None, initial_state=None, *, activation, dilation, seq_idx=None, cu_seqlens=None
):
    """y and the final states."""
    (B, L, D), W = x.shape, weight.shape[1]
    S = (W - 1) * dilation
    ends = [(b, 0, L) for b in range(B)] if cu_seqlens is None else [(0, *two) for two in pairwise(cu_seqlens.tolist())]
    zero = x.new_zeros(D)

    def at(i, time):
        b, begin, _ = ends[i]
        if time >= begin:
            return x[b, time]
        return zero if initial_state is None else initial_state[i, :, S + time - begin]

    def seen(b, time, t):
        return seq_idx is None or seq_idx[b, max(time, 0)] == seq_idx[b, t]  # before token 0 is the sequence of token 0

    y = {(b, t): zero for b in range(B) for t in range(L)}
    for i, (b, begin, end) in enumerate(ends):
        for t in range(begin, end):
            if seq_idx is not None and seq_idx[b, t] < 0:
                continue
            z = zero if bias is None else bias
            for k in range(W):
                time = t - (W - 1 - k) * dilation
                if seen(b, time, t):
                    z = z + weight[:, k] * at(i, time)
            z = z / (1 + torch.exp(-z)) if activation else z
            y[b, t] = z if residual is None else z + residual[b, t]
    states = [at(i, end - S + s) for i, (_, _, end) in enumerate(ends) for s in range(S)]

    def stacked(rows, *shape):
        return torch.stack(rows).view(shape) if rows else x.new_zeros(shape)

    return stacked(list(y.values()), B, L, D), stacked(states, len(ends), S, D).transpose(1, 2)


def gradients(call, tensors, cotangents=None):
    """Outputs and, for random cotangents or those given, the gradients of all tensors."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    outputs = call(**leaves)
    generator = torch.Generator().manual_seed(1)
    if cotangents is None:
        cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    used = [(o, c) for o, c in zip(outputs, cotangents) if o.requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in used], list(leaves.values()), [c for _, c in used], materialize_grads=True
    )
    return [output.detach() for output in outputs], dict(zip(leaves, grads))


def calls(case):
    """The reference and the loop, both as (y, final_state), or (y,) where there is no state."""
    options, final = case.options(), case.ids is None

    def reference(**tensors):
        return conv(**tensors, **options, output_final_state=True) if final else (conv(**tensors, **options),)

    return reference, lambda **tensors: loop(**tensors, **options)[: 1 + final]
