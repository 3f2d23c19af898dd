"""Layers for `kernels.kernelize`: each is the `forward` of the class of its name in transformers, on that class's own
attributes. It has no state and no methods, as the hub demands: it is bound to modules that exist."""

from typing import Any

from torch import Tensor, nn

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
    """As DeepSeek's."""


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
    """As DeepSeek's."""
