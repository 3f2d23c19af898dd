"""The convolution one token and one tap at a time, and the cases whose truth it is."""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from mhc_ops.core.check import name_of
from mhc_ops.testing import accuracy
from mhc_ops.testing.cases import Subject
from mhc_ops.testing.conv_cases import ConvCase

NAN = float("nan")


def assert_accurate(case, backend, device="cpu"):
    """Outputs, in the type of x, and gradients: one rounding of their types from fp64."""
    rows = accuracy.measure(case, backend, device)
    assert {row.dtype for row in rows if row.output in case.subject.outputs} == {name_of(case.dtype)}
    assert {"y", *(("dx", "dweight") if case.subject.differentiable else ())} <= {row.output for row in rows}
    assert [row for row in rows if not row.passed] == []


@dataclass(frozen=True)
class Looped(Subject):
    def truth(self, tensors, results):
        if "gamma" in tensors:
            return {"y": short(**tensors, **dict(self.options))}
        return dict(zip(self.outputs, loop(**tensors, **dict(self.options))))


@dataclass(frozen=True)
class Looping(ConvCase):
    """A small case, in fp64 unless told, with places of its own. Only sequences that are not padding read a state."""

    B: int = 2
    L: int = 9
    D: int = 5
    dtype: torch.dtype = torch.float64
    parameter_dtype: torch.dtype = field(default=torch.float64, kw_only=True)
    ids: tuple[tuple[int, ...], ...] | None = None
    cu: tuple[int, ...] | None = None
    state: bool = True  # False: a final one alone

    @property
    def subject(self):
        options = {"silu": self.silu, "dilation": self.dilation}
        options |= {"residual": self.residual, "norm_eps": self.norm_eps} if self.n else {}
        return Looped(**vars(super().subject) | {"options": tuple(options.items())})

    def _drawn(self, normal, generator):
        tensors = super()._drawn(normal, generator)
        state = tensors.pop("initial_state", None)
        for name, places in (("seq_idx", self.ids), ("cu_seqlens", self.cu)):
            if places is not None:
                tensors[name] = torch.tensor(places, dtype=torch.int32)
        if state is None or not self.state:
            return tensors
        if self.cu is not None:
            state = state[: len(self.cu) - 1]
        if self.ids is not None and self.L:
            state[tensors["seq_idx"][:, 0] < 0] = NAN
        return tensors | {"initial_state": state}


IDS = ((0, 0, 0, 1, 1, -1, 2, 2, 2), (-1, -1, 3, 3, 0, 0, 3, 3, -1))  # 3 comes back: its taps reach over 0
RETURNS = ((0, 1, 0, 0, -1, 2, 2, 0, 0), (5, 5, -1, 3, 3, 5, 5, 5, 5))  # to the sequence of token 0, whose state it is
PADDED = (0, 4, 4, 5, 7)  # one empty, one of a single token, tokens past the end
WITH_IDS, WITH_BOUNDS = "seq_idx states", "cu_seqlens states"
PLAIN = {"bias": False, "silu": False}
of_states, of_ids, packed = (partial(Looping, places=p) for p in ("states", WITH_IDS, WITH_BOUNDS))
both, some_W = (False, True), (1, 3, 8)
CASES = [
    *(of_states(W=W) for W in range(1, 9)),
    *(of_states(bias=bias, silu=silu, state=False) for bias in both for silu in both),
    *(of_states(dilation=dilation, residual=True) for dilation in (2, 3, 7)), Looping(residual=True),
    *(of_states(L=L, state=state) for L in (0, 1, 2) for state in both), of_states(L=2, W=3, dilation=4),
    *(of_states(*sizes) for sizes in ((0, 9, 5), (1, 9, 1), (2, 9, 0), (0, 0, 1))),
    *(Looping(ids=IDS, dilation=dilation, residual=residual) for dilation in (1, 2) for residual in both),
    Looping(ids=IDS, W=1, **PLAIN),
    *(of_ids(W=W, ids=RETURNS, dilation=dilation, residual=True) for W in some_W for dilation in (1, 2)),
    of_ids(ids=IDS, **PLAIN), of_ids(L=1, ids=((4,), (-1,))),
    *(Looping(L=0, ids=((), ()), places=places) for places in (WITH_IDS, "seq_idx")),
    *(packed(1, W=W, cu=PADDED, state=state, residual=state) for state in both for W in some_W),
    packed(1, cu=PADDED, dilation=2, **PLAIN), *(packed(1, cu=cu) for cu in ((2, 5, 9), (0,))),
    packed(1, 0, cu=(0, 0, 0)), packed(1, D=1, cu=(0, 0, 9)),
    *(Looping(*sizes, n=n, dilation=dilation, residual=residual, norm_eps=norm_eps)
      for *sizes, n, dilation in ((2, 9, 5, 4, 3, 1), (1, 12, 4, 3, 2, 3), (2, 1, 7, 8, 1, 2), (3, 5, 1, 1, 4, 1))
      for residual in both for norm_eps in (1e-5, 0.1)),
    *(replace(case, dtype=dtype, parameter_dtype=dtype, residual=True)
      for dtype in (torch.bfloat16, torch.float16, torch.float32)
      for case in (of_states(), Looping(ids=IDS), packed(1, cu=PADDED), Looping(2, 20, 64, n=2))),
]  # fmt: skip


def short(x, gamma, weight, *, silu, dilation, residual, norm_eps):
    normed = gamma * torch.nn.functional.rms_norm(x, x.shape[-1:], eps=norm_eps)
    y, _ = loop(normed.flatten(-2), weight, silu=silu, dilation=dilation)
    return y.view_as(x) + (x if residual else 0)


def loop(x, weight, bias=None, residual=None, initial_state=None, *, silu, dilation, seq_idx=None, cu_seqlens=None):
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
            z = z / (1 + torch.exp(-z)) if silu else z
            y[b, t] = z if residual is None else z + residual[b, t]
    states = [at(i, end - S + s) for i, (_, _, end) in enumerate(ends) for s in range(S)]

    def stacked(rows, *shape):
        return torch.cat([x.flatten()[:0], *rows]).view(shape)

    return stacked(list(y.values()), B, L, D), stacked(states, len(ends), S, D).transpose(1, 2)
