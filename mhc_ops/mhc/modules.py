"""Modules around the mHC functions."""

import torch
from torch import Tensor, nn

from .ops import mhc_forward_pre


class MHCBlock(nn.Module):
    """The trainable maps of one mHC layer: `h_in, h_post, h_res = block(x)` for x [..., n, D].

    h_in [..., D] is what the layer reads; h_post [..., n] and h_res [..., n, n] (raw logits, no Sinkhorn) say how its
    output is written back. Parameters: phi [n² + 2n, nD], alpha [3], bias [n² + 2n], in fp32 unless dtype says
    otherwise. A fresh block is near h_pre = 0.5, h_post = 1 and h_res = 0 for every x: alpha is 0.01 and bias 0.

    >>> block = MHCBlock(n=4, D=256)
    >>> h_in, h_post, h_res = block(torch.randn(2, 128, 4, 256))
    """

    def __init__(
        self,
        n: int = 4,
        D: int = 256,
        *,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__()
        self.n, self.D = n, D
        self.norm_eps, self.hc_eps, self.backend = norm_eps, hc_eps, backend
        M = n * n + 2 * n
        self.phi = nn.Parameter(torch.empty(M, n * D, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(M, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """phi ~ N(0, 0.02²), alpha = 0.01, bias = 0."""
        nn.init.normal_(self.phi, std=0.02)
        nn.init.constant_(self.alpha, 0.01)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return mhc_forward_pre(
            x, self.phi, self.alpha, self.bias, norm_eps=self.norm_eps, hc_eps=self.hc_eps, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"n={self.n}, D={self.D}" + (f", backend={self.backend!r}" if self.backend else "")
