"""The short convolution of flash-linear-attention (fla-core 0.6): a program runs with the import line changed.

    from mhc_ops.compat.fla import ShortConvolution, causal_conv1d, causal_conv1d_update

The same as in fla: arguments and their order, shapes, results, which calls change the cache in place, names of
parameters. A state is [N, D, W], contiguous: the last W inputs, oldest first. A convolution reads W − 1 of them; slot 0
is kept but not read, and no gradient flows through it.

Different:

- Any device and width, on the backends of mhc_ops: `backend` and FLA_CONV_BACKEND choose nothing. cu_seqlens_cpu and
  chunk_indices are not needed. The host reads no values, except in `ShortConvolution` where fla does too.
- weight is required (fla fails at weight.shape without it), and so is the cache of an update (fla then ignores x).
- An unknown activation is an error; fla ignores it.
- A state of another type is rounded to the type of x. An update computes in the type of its cache and adds its residual
  after rounding.
- With cu_seqlens, tokens outside of all sequences are zero; fla leaves their memory unwritten.
- ShortConvolution multiplies x with the mask into a new tensor; fla multiplies in place.
- seq_idx [B, T] works with every `backend`, without cu_seqlens; in fla not with "triton".
- There is no cp_context: pass the inputs before a rank's own as initial_state.
"""

from typing import Any

import torch
from torch import Tensor, nn

import mhc_ops

from ..core.check import check_tensors


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A causal depthwise convolution, SiLU with activation "silu" or "swish", then + residual.

    x: [B, T, D], or [B, T, ...] with D channels in all   weight: [D, W]   bias: [D]   residual: as x
    initial_state: [N, D, W], the W inputs before the first token; None: zeros
    cu_seqlens: [N + 1], where packed sequences begin and end, with B = 1   seq_idx: [B, T] int32, keyword only
    Returns (y, final_state): y shaped and typed as x; final_state [N, D, W], or None without output_final_state.
    Differentiable in x, weight, bias, residual and initial_state.
    """
    function = "causal_conv1d"
    if backend not in ("triton", "cuda", "mix"):
        raise ValueError(f"{function}: backend must be 'triton', 'cuda' or 'mix', got {backend!r}")
    if cp_context is not None:
        raise NotImplementedError(f"{function}: there is no cp_context; pass the inputs before x as initial_state")
    tokens, filters = _tokens_and_filters(function, x, weight)
    before = None if initial_state is None else _state(function, initial_state, tokens, filters).to(x.dtype)
    result = mhc_ops.causal_conv1d(
        tokens,
        filters,
        bias,
        activation=activation,
        residual=None if residual is None else residual.reshape(tokens.shape),
        seq_idx=kwargs.get("seq_idx") if cu_seqlens is None else None,
        cu_seqlens=cu_seqlens,
        initial_state=None if before is None else before[..., 1:],
        output_final_state=bool(output_final_state),
    )
    if isinstance(result, Tensor):
        return result.view(x.shape), None
    y, last = result
    return y.view(x.shape), torch.cat([_oldest(tokens, before, cu_seqlens, filters.shape[1]), last], -1)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One decoding step, in place on the cache: its inputs move one slot down and x is the newest.

    x: [N, D], [1, N, D] or [N, 1, D], the next token of each sequence; D may be several dimensions
    cache: [N, D, W]   residual: as x
    Returns (y, cache): y shaped and typed as x, without a gradient.
    """
    function = "causal_conv1d_update"
    check_tensors(function, x=x, cache=cache)
    tokens, filters = _tokens_and_filters(function, x, weight)
    tokens = tokens.reshape(-1, filters.shape[0]).to(cache.dtype)
    y = mhc_ops.causal_conv1d_update(tokens, cache, filters, bias, activation=activation).view(x.shape)
    return (y if residual is None else y + residual).to(x.dtype), cache


class ShortConvolution(nn.Conv1d):
    """A causal depthwise convolution and its state: an nn.Conv1d with weight [D, 1, W], as in fla.

    >>> conv = ShortConvolution(64, 4)
    >>> y, cache = conv(torch.randn(2, 10, 64), output_final_state=True)
    >>> with torch.no_grad():
    ...     y, cache = conv(torch.randn(2, 1, 64), cache=cache, output_final_state=True)  # in place
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"ShortConvolution: activation must be None, 'silu' or 'swish', got {activation!r}")
        if backend not in ("triton", "cuda"):
            raise ValueError(f"ShortConvolution: backend must be 'triton' or 'cuda', got {backend!r}")
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def forward(  # type: ignore[override]  # nn.Conv1d's takes and gives one tensor
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, D] and the state [N, D, W], or None without output_final_state.

        mask: [B, T], a factor of x; not together with cu_seqlens
        cache: [N, D, W], the state before. It is changed in place and returned if there is one token per sequence and
          no autograd; else it stays unchanged.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask and cu_seqlens exclude each other")
            x = (x * mask[..., None]).to(x.dtype)
        B, T = x.shape[:2]
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        if not torch.is_grad_enabled() and B * T == N and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all())):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight.squeeze(1),
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`causal_conv1d_update` with this filter; without a cache, an empty one."""
        if cache is None:
            cache = x.new_zeros(x.numel() // self.hidden_size, self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(x, cache, residual, self.weight.squeeze(1), self.bias, self.activation)
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}, backend={self.backend}"


def _tokens_and_filters(function: str, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """x with its channels in one dimension, and weight; an error if weight is None."""
    if weight is None:
        raise ValueError(f"{function}: weight must be [D, W], got None")
    check_tensors(function, x=x, weight=weight)
    return x.flatten(2) if x.dim() > 3 else x, weight


def _state(function: str, state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    check_tensors(function, x=x, initial_state=state)
    D, W = weight.shape
    if state.dim() != 3 or state.shape[1:] != (D, W):
        raise ValueError(f"{function}: initial_state must be [N, {D}, {W}], got {list(state.shape)}")
    return state


def _oldest(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, W: int) -> Tensor:
    """Slot 0 of the final state [N, D, 1]: the input W back from the end of each sequence, or the state's, or zero."""
    (B, T, D), x = x.shape, x.detach()  # a gradient of slot 0 would be another pass over dx
    if before is None:
        before = x.new_zeros(B if cu_seqlens is None else len(cu_seqlens) - 1, D, W)
    before = torch.cat([before[..., :1].detach(), before[..., 1:]], -1)
    if cu_seqlens is None:
        return x[:, T - W, :, None] if T >= W else before[..., T, None]
    bounds = cu_seqlens.clamp(0, T).cummax(0).values
    begin, length = bounds[:-1], bounds.diff()
    earlier = before.gather(2, length.clamp(max=W - 1)[:, None, None].expand(-1, D, 1).long())
    if T == 0:
        return earlier
    token = x[0, (begin + length - W).clamp(0, T - 1), :, None]
    return torch.where((length >= W)[:, None, None], token, earlier)
