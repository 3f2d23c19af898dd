"""Layers for `kernels.kernelize`. Each is the `forward` of the class or function of its name in transformers.

`kernelize` binds it to existing modules, so it reads their attributes. The hub allows a layer no state and no methods.
"""

from typing import Any

from torch import Tensor, nn

from ..conv import ops as conv
from ..mhc.ops import mhc_head, mhc_mean, mhc_pre


class DeepseekV4HyperConnection(nn.Module):
    """fn [n² + 2n, nD], base, scale [3]: [B, S, n, D] to post [B, S, n], comb [B, S, n, n], collapsed [B, S, D]."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        collapsed, post, comb = mhc_pre(
            hidden_streams,
            self.fn,
            self.scale,
            self.base,
            norm_eps=self.input_norm.eps,
            hc_eps=self.hc_eps,
            sinkhorn_iters=self.hc_sinkhorn_iters,
            sinkhorn_eps=self.hc_eps,
        )
        return post, comb, collapsed


class DeepseekV4HyperHead(nn.Module):
    """hc_fn [n, nD], hc_base [n], hc_scale [1]: x [B, S, n, D] to [B, S, D]."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, x: Tensor) -> Tensor:
        return mhc_head(x, self.hc_fn, self.hc_scale, self.hc_base, norm_eps=self.input_norm.eps, hc_eps=self.eps)


class Glm5NextTextHyperConnection(DeepseekV4HyperConnection):
    """The same class as DeepSeek's."""


class Glm5NextTextHyperHead(nn.Module):
    """The mean of the streams."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_streams: Tensor) -> Tensor:
        return mhc_mean(hidden_streams)


class HYV4HyperConnection(nn.Module):
    """fn [2n, nD], base, scale [2], streams stay as they are: [B, S, n, D] to post [B, S, n], collapsed [B, S, D]."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor]:
        collapsed, post, _ = mhc_pre(
            hidden_streams,
            self.fn,
            self.scale,
            self.base,
            norm_eps=self.input_norm.eps,
            hc_eps=self.hc_eps,
            post_mult=self.hc_post_magnitude,
            post_eps=self.hc_eps,
            residual="identity",
        )
        return post, collapsed


class HYV4HyperHead(DeepseekV4HyperHead):
    """The same class as DeepSeek's."""


class causal_conv1d_fn(nn.Module):
    """hidden_states [B, D, L], weight [D, W], bias [D]: [B, D, L]. Of the other arguments it reads seq_idx and, without
    seq_idx, cu_seqlens."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        seq_idx = kwargs.get("seq_idx")
        cu_seqlens = kwargs.get("cu_seqlens") if seq_idx is None else None
        x = hidden_states.mT
        return conv.causal_conv1d(x, weight, bias, activation=activation, seq_idx=seq_idx, cu_seqlens=cu_seqlens).mT


class causal_conv1d_update(nn.Module):
    """hidden_states [B, D, T], conv_state [B, D, W] or one shorter, written in place: the next T outputs [B, D, T]."""

    can_torch_compile = True
    has_backward = False  # a decoding step carries no gradient

    def forward(
        self: Any,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return conv.causal_conv1d_update(hidden_states.mT, conv_state, weight, bias, activation=activation).mT
