"""ShortConv: what it computes, what it starts as, what it keeps and prints."""

import copy

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


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm_eps", [1e-5, 0.1])
@pytest.mark.parametrize(("B", "L", "n", "D", "width", "dilation"),
                         [(2, 9, 3, 5, 4, 1), (1, 12, 2, 4, 3, 3), (2, 1, 1, 7, 8, 2), (3, 5, 4, 1, 1, 1)])  # fmt: skip
def test_is_rms_norm_and_conv1d(B, L, n, D, width, dilation, norm_eps, residual):
    """In fp64, forward and all gradients."""
    module = fresh(n, D, width, dilation, residual=residual, norm_eps=norm_eps)
    x = torch.randn(B, L, n, D, dtype=torch.float64, requires_grad=True)
    tensors = (x, module.norm_weight, module.weight)
    y, expected = module(x), oracle(*tensors, dilation, residual, norm_eps)
    assert accuracy.close(y.detach(), expected.detach())
    assert all(accuracy.close(*two) for two in zip(gradients(y, tensors), gradients(expected, tensors)))


@pytest.mark.parametrize("residual", [False, True])
def test_gradcheck(residual):
    module = fresh(2, 3, 3, 2, residual=residual)
    names = dict(module.named_parameters())

    def call(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    x = torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *names.values()))
    assert torch.autograd.gradgradcheck(call, (x, *names.values()))


@pytest.mark.parametrize("zero", [("x",), ("weight",), ("x", "gamma", "weight")], ids=str)
def test_gradcheck_at_zero(zero):
    """As with weight zero, which is how a trained model takes it in."""
    module = fresh(2, 2, 2)
    x = torch.randn(1, 3, 2, 2, dtype=torch.float64)
    tensors = {"x": x, "gamma": module.norm_weight.detach(), "weight": module.weight.detach()}
    leaves = [(torch.zeros_like(t) if name in zero else t).requires_grad_() for name, t in tensors.items()]

    def call(*tensors):
        return mhc_ops.short_conv(*tensors, norm_eps=0.1)  # 1e-5 bends too sharply for finite differences

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_hessian_vector_product_of_a_module_that_starts_at_zero():
    module = fresh(2, 8)
    nn.init.zeros_(module.weight)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    parameters = list(module.parameters())
    torch.manual_seed(2)
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def product(y):
        first = torch.autograd.grad(y.square().sum(), parameters, create_graph=True)
        return torch.autograd.grad(first, parameters, direction)

    expected = product(oracle(x, *parameters, 1, True, 1e-5))
    assert all(accuracy.close(*two) for two in zip(product(module(x)), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_once(dtype):
    module = fresh(2, 64, dtype=torch.float32)
    x = torch.randn(2, 20, 2, 64).to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, module.norm_weight, module.weight)]
    y, exact = module(x), oracle(*wide, 1, True, 1e-5)
    assert y.dtype == dtype
    assert accuracy.close(y.detach(), exact.detach())
    cotangent = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, module.norm_weight, module.weight), cotangent)
    assert all(accuracy.close(*two) for two in zip(grads, torch.autograd.grad(exact, wide, cotangent.double())))


def test_is_the_function():
    module = fresh(2, 8, 3, 2, residual=False, norm_eps=1e-2)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    options = {"dilation": 2, "residual": False, "norm_eps": 1e-2}
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
    module, conv = ShortConv(4, 256, width=5), nn.Conv1d(1024, 1024, 5, groups=1024)
    bound = 5**-0.5
    for weight in (module.weight, conv.weight):
        assert 0.99 * bound < weight.abs().max() <= bound
    assert torch.equal(module.norm_weight, torch.ones(4, 256))
    with torch.no_grad():
        module.norm_weight.zero_()
        module.weight.zero_()
    module.reset_parameters()
    assert 0.99 * bound < module.weight.abs().max() <= bound
    assert torch.equal(module.norm_weight, torch.ones(4, 256))


def test_sees_no_token_ahead_and_none_too_far_back():
    module = fresh(2, 4, 3, 2)
    x = torch.randn(1, 12, 2, 4, dtype=torch.float64)
    other = x.clone()
    other[:, 5] += 1
    changed = (module(x) != module(other)).any(-1).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [5, 7, 9]


def test_state_survives_a_round_trip(tmp_path):
    one, other = ShortConv(2, 8, 3), ShortConv(2, 8, 3)
    torch.save(copy.deepcopy(one.state_dict()), tmp_path / "state.pt")
    x = torch.randn(2, 5, 2, 8)
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(one(x), other(x))
    assert {name: tuple(t.shape) for name, t in one.state_dict().items()} == {"norm_weight": (2, 8), "weight": (16, 3)}


def test_device_and_dtype():
    module = ShortConv(2, 8, device="meta", dtype=torch.bfloat16)
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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": True}, TypeError, "n must be an int, got bool"),
        ({"D": 8.0}, TypeError, "D must be an int, got float"),
        ({"D": -1}, ValueError, "D must be at least 1, got -1"),
        ({"width": 0}, ValueError, "width must be at least 1, got 0"),
        ({"width": None}, TypeError, "width must be an int, got NoneType"),
        ({"dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
        ({"dilation": 1.5}, TypeError, "dilation must be an int, got float"),
        ({"norm_eps": "1e-5"}, TypeError, "norm_eps must be a number, got str"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps must be finite and 0 or more, got -1.0"),
        ({"norm_eps": float("nan")}, ValueError, "norm_eps must be finite and 0 or more, got nan"),
    ],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=f"^ShortConv: {message}$"):
        ShortConv(**{"n": 2, "D": 8, **arguments})


@pytest.mark.parametrize("shape", [(3, 2, 8), (1, 3, 2, 4), (1, 3, 8, 2), (1, 1, 3, 2, 8)], ids=str)
def test_input_is_checked(shape):
    with pytest.raises(ValueError, match=r"^ShortConv: x must be \[B, L, 2, 8\], got \["):
        ShortConv(2, 8)(torch.zeros(shape))


def test_backend_is_passed_on():
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


def test_autocast_changes_nothing():
    module = fresh(2, 8, dtype=torch.float32)
    x = torch.randn(2, 5, 2, 8)
    plain = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), plain)


def test_no_tokens():
    module = ShortConv(2, 8)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        x = torch.zeros(shape, requires_grad=True)
        y = module(x)
        assert y.shape == shape
        y.sum().backward()
        assert not module.weight.grad.any()


def test_more_dilation_than_tokens():
    """Taps that are all before the first token take no memory."""
    module = fresh(2, 8, 3, 2**40)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    assert torch.equal(module(x), fresh(2, 8, 3, 5)(x))


def test_strided_streams():
    module = fresh(2, 8)
    x = torch.randn(5, 3, 8, 4, dtype=torch.float64)
    streams = x.permute(1, 0, 3, 2)[:, :, ::2]
    assert torch.equal(module(streams), module(streams.contiguous()))
