"""ShortConv: what it computes, what it starts as, what it keeps and refuses."""

import pytest
import torch
from torch import nn

import mhc_ops
from mhc_ops import ShortConv


@pytest.mark.parametrize("residual", [False, True])
def test_is_short_conv(residual):
    module = ShortConv(3, 5, width=2, dilation=2, residual=residual, norm_eps=0.1)
    nn.init.normal_(module.norm_weight)
    x, options = torch.randn(2, 9, 3, 5), {"dilation": 2, "residual": residual, "norm_eps": 0.1}
    assert torch.equal(module(x), mhc_ops.short_conv(x, module.norm_weight, module.weight, **options))


def test_weight_zero_is_the_identity():
    module = ShortConv(3, 8)
    nn.init.zeros_(module.weight)
    x = torch.randn(2, 5, 3, 8)
    y = module(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert module.weight.grad.any()


def test_starts_as_conv1d_does():
    module, conv, bound = ShortConv(4, 256, width=5), nn.Conv1d(1024, 1024, 5, groups=1024), 5**-0.5
    for again in (False, True):
        if again:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
            module.reset_parameters()
        assert all(0.99 * bound < weight.abs().max() <= bound for weight in (conv.weight, module.weight))
        assert torch.equal(module.norm_weight, torch.ones(4, 256))


def test_state_device_and_dtype():
    module = ShortConv(2, 8, 3, device="meta", dtype=torch.bfloat16)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    assert shapes == {"norm_weight": (2, 8), "weight": (16, 3)}
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert {p.dtype for p in ShortConv(2, 8).parameters()} == {torch.float32}
    assert repr(module) == "ShortConv(n=2, D=8, width=3, dilation=1)"
    assert repr(ShortConv(2, 8, residual=False)) == "ShortConv(n=2, D=8, width=4, dilation=1, residual=False)"


def test_arguments_are_checked():
    counts = ("n", "D", "width", "dilation")
    wrong = [*((name, 0, ValueError) for name in counts), *((name, 8.0, TypeError) for name in counts)]
    wrong += [("norm_eps", "1e-5", TypeError), ("norm_eps", -1.0, ValueError), ("norm_eps", float("nan"), ValueError)]
    for name, value, error in wrong:
        with pytest.raises(error, match=f"^ShortConv: {name} must be "):
            ShortConv(**{"n": 2, "D": 8, name: value})
    for shape in ((3, 2, 8), (1, 3, 2, 4), (1, 3, 8, 2), (1, 1, 3, 2, 8)):
        with pytest.raises(ValueError, match=r"^ShortConv: x must be \[B, L, 2, 8\], got \["):
            ShortConv(2, 8)(torch.zeros(shape))
