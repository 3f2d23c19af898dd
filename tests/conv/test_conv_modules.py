"""ShortConv: what it computes, what it starts as, what it keeps and prints."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mhc_ops
from mhc_ops import ShortConv
from mhc_ops.testing import accuracy


def oracle(x, norm_weight, weight, dilation, residual, norm_eps):
    """Torch's own norm and convolution."""
    B, L, n, D = x.shape
    streams = [F.rms_norm(x[:, :, i], (D,), norm_weight[i], norm_eps) for i in range(n)]
    channels = F.pad(torch.cat(streams, -1).mT, ((weight.shape[1] - 1) * dilation, 0))
    y = F.silu(F.conv1d(channels, weight[:, None], dilation=dilation, groups=n * D)).mT
    return y.reshape(B, L, n, D) + (x if residual else 0)


def fresh(*sizes, dtype=torch.float64, **options):
    torch.manual_seed(0)
    module = ShortConv(*sizes, **options, dtype=dtype)
    nn.init.normal_(module.norm_weight)
    return module


def gradients(y, tensors):
    torch.manual_seed(1)
    return torch.autograd.grad(y, tensors, torch.randn(y.shape, dtype=y.dtype))  # randn_like follows the strides


SIZES = [(2, 9, 3, 5, 4, 1), (1, 12, 2, 4, 3, 3), (2, 1, 1, 7, 8, 2), (3, 5, 4, 1, 1, 1)]


@pytest.mark.parametrize("residual", [False, True])
def test_is_rms_norm_and_conv1d(residual):
    """In fp64, forward and all gradients."""
    for (B, L, n, D, width, dilation), norm_eps in product(SIZES, (1e-5, 0.1)):
        module = fresh(n, D, width, dilation, residual=residual, norm_eps=norm_eps)
        x = torch.randn(B, L, n, D, dtype=torch.float64, requires_grad=True)
        tensors = (x, module.norm_weight, module.weight)
        y, expected = module(x), oracle(*tensors, dilation, residual, norm_eps)
        assert accuracy.close(y.detach(), expected.detach())
        assert all(accuracy.close(*two) for two in zip(gradients(y, tensors), gradients(expected, tensors)))


# A trained model takes it in with a weight of zero. There an eps of 1e-5 bends too sharply for finite differences.
@pytest.mark.parametrize(
    ("zero", "sizes", "options"),
    [
        ((), (2, 3, 3, 2), {"dilation": 2}),
        ((), (2, 3, 3, 2), {"dilation": 2, "residual": False}),
        *((zero, (2, 2, 2, 1), {"norm_eps": 0.1}) for zero in (("x",), ("weight",), ("x", "gamma", "weight"))),
    ],
    ids=str,
)
def test_gradcheck(zero, sizes, options):
    n, D, *_ = sizes
    module = fresh(*sizes)
    x = torch.randn(1, 6 if not zero else 3, n, D, dtype=torch.float64)
    tensors = {"x": x, "gamma": module.norm_weight.detach(), "weight": module.weight.detach()}
    leaves = [(torch.zeros_like(t) if name in zero else t).requires_grad_() for name, t in tensors.items()]
    call = partial(mhc_ops.short_conv, **options)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_rounded_once():
    module = fresh(2, 64, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(2, 20, 2, 64).to(dtype).requires_grad_()
        wide = [t.detach().double().requires_grad_() for t in (x, module.norm_weight, module.weight)]
        y, exact = module(x), oracle(*wide, 1, True, 1e-5)
        assert y.dtype == dtype
        assert accuracy.close(y.detach(), exact.detach())
        cotangent = torch.randn_like(y)
        grads = torch.autograd.grad(y, (x, module.norm_weight, module.weight), cotangent)
        assert all(accuracy.close(*two) for two in zip(grads, torch.autograd.grad(exact, wide, cotangent.double())))


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
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in ShortConv(2, 8).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


def test_repr():
    assert repr(ShortConv(4, 64)) == "ShortConv(n=4, D=64, width=4, dilation=1)"
    text = repr(ShortConv(4, 64, 3, 2, residual=False, norm_eps=1e-3, backend="reference"))
    assert text == "ShortConv(n=4, D=64, width=3, dilation=2, residual=False, norm_eps=0.001, backend='reference')"


ARGUMENTS = [
    *(({name: 0}, ValueError, f"{name} must be at least 1, got 0") for name in ("n", "D", "width", "dilation")),
    *(({name: 8.0}, TypeError, f"{name} must be an int, got float") for name in ("n", "D", "width", "dilation")),
    ({"norm_eps": "1e-5"}, TypeError, "norm_eps must be a number, got str"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps must be finite and 0 or more, got -1.0"),
    ({"norm_eps": float("nan")}, ValueError, "norm_eps must be finite and 0 or more, got nan"),
]


def test_arguments_are_checked():
    for arguments, error, message in ARGUMENTS:
        with pytest.raises(error, match=f"^ShortConv: {message}$"):
            ShortConv(**{"n": 2, "D": 8, **arguments})
    for shape in ((3, 2, 8), (1, 3, 2, 4), (1, 3, 8, 2), (1, 1, 3, 2, 8)):
        with pytest.raises(ValueError, match=r"^ShortConv: x must be \[B, L, 2, 8\], got \["):
            ShortConv(2, 8)(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"^short_conv: backend must be one of .* got 'cuda'$"):
        ShortConv(2, 8, backend="cuda")(torch.zeros(1, 3, 2, 8))


def test_compile():
    """One graph, forward and backward, with the values of eager; and no second graph for other sizes."""
    torch.compiler.reset()
    module = fresh(2, 8, 3, 2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(3, 9, 2, 8, dtype=torch.float64, requires_grad=True)

    def same(x):
        tensors = (x, module.norm_weight, module.weight)
        y, expected = compiled(x), module(x)
        grads = zip(gradients(y, tensors), gradients(expected, tensors))
        return torch.equal(y, expected) and all(accuracy.close(*two) for two in grads)

    assert same(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same(torch.randn(5, 14, 2, 8, dtype=torch.float64, requires_grad=True))


def test_autocast_and_strides_change_nothing():
    module, x = fresh(2, 8, dtype=torch.float32), torch.randn(2, 5, 2, 8)
    plain = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), plain)
    streams = torch.randn(5, 3, 8, 4, dtype=torch.float64).permute(1, 0, 3, 2)[:, :, ::2]
    assert torch.equal(module.double()(streams), module(streams.contiguous()))


def test_no_tokens():
    module = ShortConv(2, 8)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        y = module(torch.zeros(shape, requires_grad=True))
        assert y.shape == shape
        y.sum().backward()
        assert not module.weight.grad.any()


def test_more_dilation_than_tokens():
    """Taps that are all before the first token take no memory."""
    module = fresh(2, 8, 3, 2**40)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    assert torch.equal(module(x), fresh(2, 8, 3, 5)(x))
