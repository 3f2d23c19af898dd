"""The module around the convolution over streams."""

import torch
from torch import Tensor, nn

from ..core.check import check_count, check_flag, check_numbers, check_tensors
from ..core.maps import KeepsMaps, type_of_maps
from .ops import short_conv


class ShortConv(KeepsMaps, nn.Module):
    """A short causal convolution over the streams of an mHC model: `y = ShortConv(n, D)(x)` for x [B, L, n, D].

    RMSNorm with a weight per stream normalises each stream over its D channels. Each of the n·D channels is then
    filtered over time by its own `width` taps, `dilation` tokens apart, the last of them on the token itself. SiLU
    follows and, with residual=True, + x:

        y = x + silu(conv(rmsnorm(x)))

    Engram lets a token see the few before it this way: it looks up one [D] vector per stream in its memory, and its
    ShortConv runs over these before they are added to the streams, outside of the mHC layers. A token sees
    (width − 1)·dilation tokens back and none ahead. There is no state between calls: pass whole sequences.

    >>> conv = ShortConv(4, 64, width=4, dilation=3)
    >>> conv(torch.randn(2, 10, 4, 64)).shape
    torch.Size([2, 10, 4, 64])

    Parameters: norm_weight [n, D], ones at first, and weight [n·D, width], uniform within ±1/√width as in nn.Conv1d.
    There is no bias. Their dtype is the one given, else torch's default. norm_weight is fp32 where that default is
    narrower, and stays fp32 when the module is cast to a narrower type; with cast_maps=True it follows.

    With weight zero and residual=True the module is the identity, so it can be added to a trained model:
    `nn.init.zeros_(conv.weight)`. From there weight learns at once, and norm_weight once weight has moved.
    """

    norm_weight: nn.Parameter
    weight: nn.Parameter
    map_names = ("norm_weight",)
    has_filters = True  # weight has a row for each channel and is no matrix

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
        cast_maps: bool = False,
    ):
        super().__init__()
        for name, value in (("n", n), ("D", D), ("width", width), ("dilation", dilation)):
            check_count("ShortConv", name, value)
        (self.norm_eps,) = check_numbers("ShortConv", norm_eps=norm_eps)
        check_flag("ShortConv", "residual", residual)
        self.n, self.D, self.width, self.dilation = n, D, width, dilation
        self.residual, self.backend = residual, backend
        of_norm, self.cast_maps = type_of_maps("ShortConv", dtype, cast_maps)
        self.norm_weight = nn.Parameter(torch.empty(n, D, device=device, dtype=of_norm))
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
        """n=4, D=64, width=4, dilation=1, then options that differ from their defaults, and a named backend."""
        words = [f"n={self.n}", f"D={self.D}", f"width={self.width}", f"dilation={self.dilation}"]
        words += [] if self.residual else ["residual=False"]
        words += [] if self.norm_eps == 1e-5 else [f"norm_eps={self.norm_eps}"]
        return ", ".join(words + ([f"backend={self.backend!r}"] if self.backend else []))
