"""The module around the convolution over streams."""

import torch
from torch import Tensor, nn

from ..core.check import check_count, check_flag, check_numbers, check_tensors
from .ops import short_conv


class ShortConv(nn.Module):
    """A short causal convolution over the streams of an mHC model: `y = ShortConv(n, D)(x)` for x [B, L, n, D].

    Each stream is normalised over its D channels (RMSNorm with a weight of its own), each of the n·D channels is
    filtered over time with its own `width` taps, `dilation` tokens apart, the last of them on the token itself; then
    SiLU and, with residual=True, + x:

        y = x + silu(conv(rmsnorm(x)))

    This is how Engram lets a token see the few before it: what it looked up in its memory is one [D] vector per stream,
    and its ShortConv runs over them before they are added to the streams, beside the mHC layers and outside of them.
    A token sees (width − 1)·dilation tokens back and none ahead. There is no state between calls: give it whole
    sequences.

    >>> conv = ShortConv(4, 64, width=4, dilation=3)
    >>> conv(torch.randn(2, 10, 4, 64)).shape
    torch.Size([2, 10, 4, 64])

    Parameters: norm_weight [n, D], ones at first, and weight [n·D, width], uniform within ±1/√width as in nn.Conv1d;
    there is no bias. They have the dtype given, else torch's default, as in every module of torch. With weight zero and
    residual=True the module is the identity, which is a way to add it to a model that is already trained:
    `nn.init.zeros_(conv.weight)`. From there weight learns at once, norm_weight once it moved.
    """

    norm_weight: nn.Parameter
    weight: nn.Parameter

    def __init__(
        self,
        n: int,
        D: int,
        width: int = 4,
        dilation: int = 1,
        *,
        residual: bool = True,
        norm_eps: float = 1e-5,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("n", n), ("D", D), ("width", width), ("dilation", dilation)):
            check_count("ShortConv", name, value)
        (self.norm_eps,) = check_numbers("ShortConv", norm_eps=norm_eps)
        check_flag("ShortConv", "residual", residual)
        self.n, self.D, self.width, self.dilation = n, D, width, dilation
        self.residual, self.backend = residual, backend
        self.norm_weight = nn.Parameter(torch.empty(n, D, device=device, dtype=dtype))
        self.weight = nn.Parameter(torch.empty(n * D, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """norm_weight = 1, weight uniform within ±1/√width."""
        nn.init.ones_(self.norm_weight)
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        check_tensors("ShortConv", x=x)
        if x.dim() != 4 or x.shape[2:] != (self.n, self.D):
            raise ValueError(f"ShortConv: x must be [B, L, {self.n}, {self.D}], got {list(x.shape)}")
        return short_conv(
            x,
            self.norm_weight,
            self.weight,
            dilation=self.dilation,
            residual=self.residual,
            norm_eps=self.norm_eps,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """n=4, D=64, width=4, dilation=1, what differs from the defaults, and the backend where one was named."""
        words = [f"n={self.n}", f"D={self.D}", f"width={self.width}", f"dilation={self.dilation}"]
        words += [] if self.residual else ["residual=False"]
        words += [] if self.norm_eps == 1e-5 else [f"norm_eps={self.norm_eps}"]
        return ", ".join(words + ([f"backend={self.backend!r}"] if self.backend else []))
