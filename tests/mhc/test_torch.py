"""How torch sees the ops: torch.compile, export, torch.func, and the direct path that none of them takes."""

from functools import partial

import pytest
import torch
from stack_results import assert_close, assert_equal, gradients
from torch.autograd import forward_ad

import mhc_ops
from mhc_ops.mhc.contracts import mhc_pre_fwd
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import cases

SUBJECT = cases.MHC_FORWARD_PRE
OPTIONS = PreOptions(sinkhorn_iters=0)


def detached(device, gamma=True):
    return cases.Case(SUBJECT, (6,), 3, 20, torch.float32, gamma=gamma).inputs(device)


def leaves(device):
    return {name: tensor.requires_grad_() for name, tensor in detached(device).items()}


def forward(x, phi, alpha, bias, gamma=None):
    return mhc_ops.mhc_forward_pre(x, phi, alpha, bias, gamma=gamma, backend="triton")


def traced(x, phi, alpha, bias, gamma):
    return mhc_pre_fwd.traced(x, phi, alpha, bias, gamma, None, *OPTIONS, "triton")


def test_direct_and_traced_give_the_same_bits(kernel_device):
    """Intermediates carry no gradient, and the traced op has no second derivative."""
    tensors = leaves(kernel_device)
    ours = mhc_ops.mhc_forward_pre(**tensors, outflag=True, backend="triton")
    theirs = traced(**tensors)
    assert [output.requires_grad for output in (*ours, *theirs)] == ([True] * 3 + [False] * 3) * 2
    assert_equal(ours[3:], theirs[3:])
    assert_equal(*(gradients(outputs[:3], list(tensors.values())) for outputs in (ours, theirs)))
    (dx,) = torch.autograd.grad(traced(**tensors)[0].square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        dx.sum().backward()


def test_autocast(place):
    tensors = detached(place[1])
    mean, maps = mhc_ops.mhc_mean(tensors["x"], backend=place[0]), mhc_ops.mhc_forward_pre(**tensors, backend=place[0])
    with torch.autocast(place[1], torch.bfloat16):
        assert_equal(mhc_ops.mhc_mean(tensors["x"], backend=place[0]), mean)
        assert_equal(mhc_ops.mhc_forward_pre(**tensors, backend=place[0]), maps)


def test_forward_mode_raises(kernel_device):
    """Tangents would be dropped in silence."""
    tensors = detached(kernel_device)
    message = "mhc_pre_fwd: forward-mode differentiation works with backend='reference' only"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        forward(**{**tensors, "x": forward_ad.make_dual(tensors["x"], torch.ones_like(tensors["x"]))})
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: forward(**{**tensors, "x": x}), (tensors["x"],), (torch.ones_like(tensors["x"]),))


@pytest.fixture
def energy(place):
    return energy_of(*place)


def energy_of(backend, device):
    """A number made of all that mhc_pre returns, as a function of x; some x; the backend's name."""
    tensors = cases.Case(cases.MHC_PRE, (3,), 2, 8, torch.float32).inputs(device)
    x = tensors.pop("x")
    return lambda x: sum(out.square().sum() for out in mhc_ops.mhc_pre(x, **tensors, backend=backend)), x, backend


def gradient_of(call, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf), leaf)[0]


def test_func_grad(energy):
    """A module's derivative by its parameters is taken too, with its layer."""
    call, x, backend = energy
    expected = gradient_of(call, x)
    assert torch.equal(torch.func.grad(call)(x), expected)
    _, back = torch.func.vjp(call, x)
    assert torch.equal(back(torch.ones((), device=x.device))[0], expected)
    module = mhc_ops.HyperConnection(torch.nn.Linear(8, 8), 2, 8, gamma=True, backend=backend).to(x.device)
    parameters = dict(module.named_parameters())
    expected = torch.autograd.grad(module(x).square().sum(), list(parameters.values()))
    found = torch.func.grad(lambda given: torch.func.functional_call(module, given, (x,)).square().sum())(parameters)
    assert_close([found[name] for name in parameters], expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(energy):
    """A call for each element in kernels."""
    call, x, _ = energy
    gradient = gradient_of(call, x)
    alone = lambda row: call(row[None])  # noqa: E731
    found = [torch.func.vmap(alone)(x), torch.func.vmap(torch.func.grad(alone))(x), torch.func.jacrev(call)(x)]
    assert_close(found, [torch.stack([alone(row) for row in x]), gradient, gradient])


SECOND = {
    "func.grad twice": lambda call, x: torch.func.grad(lambda x: torch.func.grad(call)(x).square().sum())(x),
    "func.hessian": lambda call, x: torch.func.hessian(call)(x),
    "functional.hessian": lambda call, x: torch.autograd.functional.hessian(call, x),
    "grad of a penalty": lambda call, x: gradient_of(lambda x: penalty(call, x), x),
}


def penalty(call, x):
    """The energy and the square of its gradient: both have a gradient."""
    value = call(x)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + gradient.square().sum()


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_second_derivative(second, energy):
    """Right or refused, by whatever way; half of it would pass for all of it."""
    call, x, backend = energy
    if backend == "reference":
        assert second(call, x).isfinite().all()
        return
    refused = "mhc_pre_(bwd: a second derivative|fwd: forward-mode differentiation)"
    with pytest.raises(NotImplementedError, match=f"^{refused} works with backend='reference' only$"):
        second(call, x)


def test_func_under_compile(kernel_device):
    """grad is left to eager, or refused where there must be one graph; a tangent was dropped in silence."""
    call, x, _ = energy_of("triton", kernel_device)
    compiled = partial(torch.compile, torch.func.grad(call), backend="aot_eager")
    forward_mode = torch.compile(lambda x: torch.func.jvp(call, (x,), (x,))[1], backend="aot_eager")
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"mhc_pre_fwd: a derivative by torch\.func under torch\.compile works with"):
        compiled(fullgraph=True)(x)
    with pytest.raises(NotImplementedError, match=r"^mhc_pre_fwd: forward-mode differentiation works with backend="):
        forward_mode(x)
    torch.compiler.reset()
    assert torch.equal(compiled()(x), gradient_of(call, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_jit_trace(energy):
    """What was traced computes with the values it is given, not with those of the trace."""
    call, x, backend = energy
    traced = torch.jit.trace(call, (x,))
    assert torch.equal(traced(2 * x), call(2 * x))
    assert ("mhc_ops::mhc_pre_fwd" in str(traced.graph)) == (backend == "triton")
