"""How torch sees the ops: torch.compile, export, torch.func, and the direct path that none of them takes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from stack_results import assert_equal, gradients, random_cotangents
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import mhc_ops
from mhc_ops.core.modes import is_eager
from mhc_ops.mhc.contracts import mhc_pre_fwd
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import accuracy, cases

SUBJECT = cases.MHC_FORWARD_PRE
OPTIONS = PreOptions(sinkhorn_iters=0)


def leaves(device, gamma=True):
    inputs = cases.Case(cases.MHC_FORWARD_PRE, (6,), 3, 20, torch.float32, gamma=gamma).inputs(device)
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def forward(x, phi, alpha, bias, gamma=None):
    return mhc_ops.mhc_forward_pre(x, phi, alpha, bias, gamma=gamma, backend="triton")


def traced(x, phi, alpha, bias, gamma):
    return mhc_pre_fwd.traced(x, phi, alpha, bias, gamma, None, *OPTIONS, "triton")


def direct(x, phi, alpha, bias, gamma):
    parameters = {"phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "layer_norm_weight": None}
    return mhc_pre_fwd(x=x, **parameters, options=OPTIONS, backend="triton")


def results(call, tensors):
    """Outputs and gradients."""
    return gradients(call(**tensors), [t for t in tensors.values() if t.requires_grad])


def detached(device, gamma=True):
    return {name: tensor.detach() for name, tensor in leaves(device, gamma).items()}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile(compiler, kernel_device, cxx):
    """One graph, forward and backward, the bits of eager; and no second graph for another number of tokens."""
    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=compiler, dynamic=True)
    tensors = leaves(kernel_device)
    assert_equal(results(compiled, tensors), results(forward, tensors))
    with torch.compiler.set_stance("fail_on_recompile"):
        longer = {**tensors, "x": torch.cat([tensors["x"].detach()] * 2).requires_grad_()}
        assert_equal(results(compiled, longer), results(forward, longer))


def test_compile_in_a_scope(kernel_device):
    """use_backend can be traced."""
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def scoped(tensors):
        return mhc_ops.mhc_forward_pre(**tensors)

    tensors = leaves(kernel_device)
    with mhc_ops.use_backend("triton"):
        assert_equal(scoped(tensors), forward(**tensors))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile_the_reference(device, cxx):
    torch.compiler.reset()
    compiled = replace(SUBJECT, call=torch.compile(SUBJECT.call, fullgraph=True))
    ran = accuracy.run_case(cases.Case(compiled, (6,), 3, 20, torch.float32), "reference", device)
    for name, exact in accuracy.truth(SUBJECT, ran.tensors, ran.cotangents).items():
        assert accuracy.close(ran.results[name], exact), name


def test_one_node_for_each_call(kernel_device):
    """In torch.export and in make_fx; the exported program has the bits of the call."""

    class Module(torch.nn.Module):
        def forward(self, x, phi, alpha, bias):
            return forward(x, phi, alpha, bias)

    tensors = detached(kernel_device, gamma=False)
    program = torch.export.export(Module(), tuple(tensors.values()))
    for graph in (program.graph, make_fx(forward)(*detached(kernel_device).values()).graph):
        called = [node for node in graph.nodes if node.target == torch.ops.mhc_ops.mhc_pre_fwd.default]
        assert len(called) == 1
    assert_equal(program.module()(*tensors.values()), forward(**tensors))


def test_fake_tensors(kernel_device):
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in detached(kernel_device).items()}
        h_in, h_post, h_res = forward(**fakes)
    assert (h_in.shape, h_post.shape, h_res.shape) == ((6, 20), (6, 3), (6, 3, 3))


def test_direct_and_traced_give_the_same_bits(kernel_device):
    """Intermediates carry no gradient."""
    tensors = leaves(kernel_device)
    ours, theirs = direct(*tensors.values()), traced(*tensors.values())
    assert [output.requires_grad for output in (*ours, *theirs)] == ([True] * 3 + [False] * 3) * 2
    assert_equal(ours[3:], theirs[3:])
    assert_equal(*(gradients(outputs[:3], list(tensors.values())) for outputs in (ours, theirs)))


def test_double_backward_of_the_traced_op_raises(kernel_device):
    tensors = leaves(kernel_device)
    outputs = traced(*tensors.values())
    (dx,) = torch.autograd.grad(outputs[0].square().sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        dx.sum().backward()


@pytest.mark.parametrize("op", [traced, direct])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(reentrant, op, kernel_device):
    tensors = leaves(kernel_device)
    outputs = checkpoint(lambda *given: op(*given)[:3], *tensors.values(), use_reentrant=reentrant)
    torch.autograd.backward(outputs, random_cotangents(outputs))
    assert_equal([tensor.grad for tensor in tensors.values()], results(forward, tensors)[3:])


@pytest.mark.parametrize("frozen", [("x",), ("phi",), ("phi", "alpha", "bias", "gamma")], ids=str)
def test_frozen_inputs(frozen, kernel_device):
    tensors = leaves(kernel_device)
    expected = results(forward, tensors)
    wanted = [*expected[:3], *(g for name, g in zip(tensors, expected[3:]) if name not in frozen)]
    assert_equal(results(forward, {k: t.detach() if k in frozen else t for k, t in tensors.items()}), wanted)


def test_autocast_and_inference_mode(place):
    """They change nothing."""
    tensors = detached(place[1])
    expected = mhc_ops.mhc_forward_pre(**tensors, backend=place[0])
    for mode in (torch.autocast(place[1], torch.bfloat16), torch.inference_mode()):
        with mode:
            assert_equal(mhc_ops.mhc_forward_pre(**tensors, backend=place[0]), expected)


def test_forward_mode_raises(kernel_device):
    """Tangents would be dropped in silence."""
    tensors = detached(kernel_device)
    message = "mhc_pre_fwd: forward-mode differentiation works with backend='reference' only"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        forward(**{**tensors, "x": forward_ad.make_dual(tensors["x"], torch.ones_like(tensors["x"]))})
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: forward(**{**tensors, "x": x}), (tensors["x"],), (torch.ones_like(tensors["x"]),))


def test_only_plain_tensors_are_eager():
    plain = torch.zeros(2)
    assert is_eager((plain, torch.nn.Parameter(plain), None, 1.0, "triton"))
    with FakeTensorMode() as mode:
        assert not is_eager((plain,))
    assert not is_eager((mode.from_tensor(plain),))
    with torch.device("cpu"):
        assert not is_eager((plain,))
    seen = []
    torch.func.vmap(lambda t: (seen.append(is_eager((t,))), t)[1])(plain)
    assert seen == [False]


@pytest.fixture
def energy(place):
    return energy_of(*place)


def energy_of(backend, device):
    """A number made of all that mhc_pre returns, as a function of x; some x; the backend's name."""
    tensors = cases.Case(cases.MHC_PRE, (3,), 2, 8, torch.float32).inputs(device)

    def call(x):
        return sum(output.square().sum() for output in mhc_ops.mhc_pre(**{**tensors, "x": x}, backend=backend))

    return call, tensors["x"], backend


def gradient_of(call, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf), leaf)[0]


def test_func_grad(energy):
    call, x, _ = energy
    expected = gradient_of(call, x)
    assert torch.equal(torch.func.grad(call)(x), expected)
    _, back = torch.func.vjp(call, x)
    assert torch.equal(back(torch.ones((), device=x.device))[0], expected)


def test_func_grad_of_a_module(energy):
    """Layer and all, by its parameters."""
    _, x, backend = energy
    module = mhc_ops.HyperConnection(torch.nn.Linear(8, 8), 2, 8, gamma=True, backend=backend, device=x.device)
    module.layer.to(x.device)
    parameters = dict(module.named_parameters())
    loss = module(x).square().sum()
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
    found = torch.func.grad(lambda given: torch.func.functional_call(module, given, (x,)).square().sum())(parameters)
    assert all(accuracy.close(found[name], expected[name].double()) for name in parameters)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(energy):
    """A call for each element in kernels."""
    call, x, _ = energy
    one_by_one = torch.stack([call(row[None]) for row in x])
    assert accuracy.close(torch.func.vmap(lambda row: call(row[None]))(x), one_by_one.double())
    gradients = torch.func.vmap(torch.func.grad(lambda row: call(row[None])))(x)
    assert accuracy.close(gradients, gradient_of(call, x).double())
    assert accuracy.close(torch.func.jacrev(call)(x), gradient_of(call, x).double())


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
    message = (
        r"^mhc_pre_(bwd: a second derivative|fwd: forward-mode differentiation) works with backend='reference' only$"
    )
    with pytest.raises(NotImplementedError, match=message):
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
