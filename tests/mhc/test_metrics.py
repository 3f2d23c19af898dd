"""metrics: what it says is true, and the model does not notice."""

from contextlib import nullcontext
from functools import partial

import networks
import pytest
import stack_oracle as oracle
import torch
from mhc_kernels import fp32, needs
from networks import DEPTH, D, N, streams
from stack_results import assert_equal
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mhc_ops
from mhc_ops import HyperStack
from mhc_ops.core import private

CPU, CUDA = ("reference", "cpu"), ("triton", "cuda")
PARAMETERS = ("phi", "alpha", "bias")
OPTIONS = {
    "sinkhorn": {"sinkhorn_iters": 20},
    "transposed": {"transposed": True, "post_mult": 1.5, "norm_eps": 0.1},
    "identity": {"residual": "identity", "post_eps": 0.01, "hc_eps": 0.01},
}


def connections(residual="sinkhorn", place=CPU, dtype=fp32, depth=DEPTH, **further):
    """The same each time; logits to both sides of 6, and rows of h_res that do not sum to 1."""
    options = {"gamma": True, "layer_norm": True, **OPTIONS[residual], **further}
    made = networks.connections(place, depth, lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()), **options)
    with torch.no_grad():
        for connection in made:
            connection.to("cpu", dtype)
            for parameter in list(connection.parameters(recurse=False))[1:]:  # phi is random
                parameter.add_(torch.randn(parameter.shape, dtype=dtype))
            connection.alpha.mul_(3)
            connection.bias.mul_(2.5)
    return [connection.to(place[1]) for connection in made]


def batches(place=CPU, dtype=fp32):
    first, second = streams(place, dtype, (10,)).detach().split([6, 4])
    return [first.unflatten(0, (2, 3)), second]


def run(model, xs):
    """Outputs and gradients of a step with gradient accumulation."""
    outputs = [model(x) for x in xs]
    for output in outputs:
        output.float().square().sum().backward()
    return [*outputs, *(p.grad for p in model.parameters() if p.grad is not None)]


def seen(model, xs):
    with mhc_ops.metrics(model) as health:
        run(model, xs)
    return health.result()


def assert_unnoticed(made, xs):
    """made: makes the same model in each call. Returns the numbers."""
    alone, model = run(made(), xs), made()
    with mhc_ops.metrics(model) as health:
        assert_equal(run(model, xs), alone)
    return health.result()


@pytest.fixture
def stack():
    return HyperStack(*connections())


def expected(made, xs, shifted):
    """In plain loops over all tokens; norms of the gradients that are there."""
    x, found = torch.cat([x.flatten(0, -3) for x in xs]), {}
    composite = torch.eye(N, dtype=torch.float64).expand(len(x), N, N)
    options = [connection.options for connection in made]
    layers = [torch.no_grad()(connection.layer.forward) for connection in made]
    own = [{name: p.detach() for name, p in connection.named_parameters(recurse=False)} for connection in made]
    for number, (connection, given) in enumerate(zip(made, options)):
        read = oracle.stack(x, layers[:number], own[:number], options[:number], shifted=shifted)
        read = list((read[0] if shifted else read).unbind(1))
        of_maps = {name: own[number][name] for name in (*PARAMETERS, "gamma")}
        z = torch.cat(oracle.logits(read, **of_maps, norm_eps=given["norm_eps"]), -1)
        h_pre, h_post, h_res = oracle.maps(read, **of_maps, **given)
        values = {f"d{name}_norm": getattr(connection, name).grad.norm() for name in PARAMETERS}
        for name, begin, h in (("pre", 0, torch.cat(h_pre, -1)), ("post", N, torch.cat(h_post, -1))):
            values |= {f"h_{name}_mean": h.mean(), f"h_{name}_min": h.min(), f"h_{name}_max": h.max()}
            values[f"saturated_{name}"] = (z[:, begin : begin + N].abs() > 6).double().mean()
        if h_res is not None:
            res = torch.stack([torch.cat(row, -1) for row in h_res], 1)
            composite = (res if given["transposed"] else res.mT) @ composite
            values |= {"saturated_res": (z[:, 2 * N :].abs() > 6).double().mean()}
            values |= {"h_res_row_error": (res.sum(-1) - 1).abs().max(), "h_res_max": res.max()}
            values |= {"h_res_column_error": (res.sum(-2) - 1).abs().max()}
            values |= {"h_res_entropy": -(res * res.log()).sum((-2, -1)).mean() / N}
        found |= {f"{number}/{name}": value for name, value in values.items()}
    sizes = composite.abs()
    found |= {"gain_forward": sizes.sum(-1).amax(-1).mean(), "gain_backward": sizes.sum(-2).amax(-1).mean()}
    return {name: float(value) for name, value in found.items()}


MODELS = {"alone": nn.Sequential, "stack": HyperStack, "shifted": partial(HyperStack, shifted=True)}
MODELS["recompute"] = partial(HyperStack, recompute=2)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("residual", OPTIONS)
def test_values(residual, kind):
    """After two passes with accumulated gradients, which are those of a model that ran without metrics."""
    made, xs = lambda: MODELS[kind](*connections(residual, dtype=torch.float64)), batches(dtype=torch.float64)
    found, unseen = assert_unnoticed(made, xs), made()
    run(unseen, xs)
    assert found == pytest.approx(expected(unseen, xs, kind == "shifted"), rel=1e-6, abs=1e-12)
    for which in ("pre", "post"):
        assert any(0 < found[f"{i}/saturated_{which}"] < 1 for i in range(DEPTH))
    if residual == "identity":
        assert found["gain_forward"] == found["gain_backward"] == 1
        assert not any("res" in name for name in found)
    else:
        assert max(found["gain_forward"], found["gain_backward"]) > 1.001
        assert abs(found["gain_forward"] - found["gain_backward"]) > 1e-3  # told apart


def test_nothing_changes_in_kernels(kernel_device):
    """Few iterations: the interpreter takes its time."""
    pytest.importorskip("triton")
    made = lambda *place: HyperStack(*connections(place=place, sinkhorn_iters=2), recompute=2)  # noqa: E731
    xs = batches(("triton", kernel_device))[1:]
    found = assert_unnoticed(lambda: made("triton", kernel_device), xs)
    assert found == pytest.approx(seen(made("reference", kernel_device), xs), rel=1e-4, abs=1e-6)


def test_autocast():
    """The layers run in bf16; the maps, and what is said of them, in fp32."""
    made = lambda: HyperStack(*connections())  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        found = assert_unnoticed(made, batches())
    first = {name: value for name, value in found.items() if name.startswith("0/") and "norm" not in name}
    exact = seen(made(), batches())
    assert first == {name: exact[name] for name in first}


@pytest.mark.parametrize("by", ["connection", "non-reentrant", "reentrant"])
def test_a_checkpoint_counts_once(by, stack):
    """The first of two passes is run again in the backward: counted twice, it would move the means."""
    expected = seen(HyperStack(*connections()), batches())
    with mhc_ops.metrics(stack) as health:
        for x, kind in zip(batches(), (by, "no checkpoint")):
            for connection in stack:
                connection.checkpoint = kind == "connection"
            again = partial(checkpoint, stack, use_reentrant=kind == "reentrant") if "reentrant" in kind else stack
            again(x.requires_grad_()).square().sum().backward()
    assert health.result() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_selective_checkpoint():
    """It keeps results of some operations, by the order in which they run, and takes them again in the backward."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sum.dim_IntList]
    contexts = partial(create_selective_checkpoint_contexts, saved)

    class Checkpointed(HyperStack):
        def forward(self, x):
            ended = lambda x: super(Checkpointed, self).forward(x).sum(-2).square()  # noqa: E731
            return checkpoint(ended, x, use_reentrant=False, context_fn=contexts)

    assert_unnoticed(lambda: Checkpointed(*connections()), batches())


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [dict(getattr(module, kind)) for module in model.modules() for kind in kinds]


def test_nothing_stays(stack):
    """Other hooks do; nor does anything of it stay when the model fails."""
    called = []
    stack[1].register_forward_hook(lambda *_: called.append(1))
    before = hooks_of(stack)
    seen(stack, batches())
    assert hooks_of(stack) == before and len(called) == 2
    with pytest.raises(ValueError, match="x must be"), mhc_ops.metrics(stack):
        assert hooks_of(stack) != before
        stack(torch.zeros(2, N + 1, D))
    assert hooks_of(stack) == before


def test_parts_of_a_model(stack):
    """A connection alone has all numbers; the gain of all connections is that of calls of the model itself."""
    alone, of_stack = (seen(model, batches()) for model in (*connections(depth=1), HyperStack(*connections(depth=1))))
    assert alone == {name.removeprefix("0/"): value for name, value in of_stack.items()}
    x, y = batches()
    expected = seen(HyperStack(*connections()), [x])
    with mhc_ops.metrics(stack) as health:
        stack[2](y)
    assert {name.partition("/")[0] for name in health.result()} == {"2"}
    with mhc_ops.metrics(stack) as health:
        stack(x)
        stack[2](y)
    for name in ("gain_forward", "gain_backward"):
        assert health.result()[name] == expected[name]


def test_calls_that_fail_or_have_no_tokens(stack):
    """Their maps are no part of those of the next call."""

    def fail(layer, inputs):
        raise ArithmeticError

    x, _ = batches()
    with mhc_ops.metrics(stack) as health:
        with stack[2].layer.register_forward_pre_hook(fail), pytest.raises(ArithmeticError):
            stack(x)
        run(stack, [x[:0], x])
    assert health.result() == pytest.approx(seen(HyperStack(*connections()), [x]), rel=1e-6)


def test_shapes_that_change():
    """As from an encoder to a decoder: two maps; the gain is the mean over the tokens of both."""
    (x, y), (one, other) = batches(), connections(depth=2)
    both = nn.ModuleList([one, other])
    both.forward = lambda x, y: one(x).sum() + other(y).sum()
    with mhc_ops.metrics(both) as health:
        both(x, y)
    gains = [seen(connection, [z])["gain_backward"] for connection, z in ((one, x), (other, y))]
    assert health.result()["gain_backward"] == pytest.approx((6 * gains[0] + 4 * gains[1]) / 10, rel=1e-6)


@pytest.mark.gpu
def test_the_host_does_not_wait():
    stack, xs = HyperStack(*connections(place=CUDA)), batches(CUDA)
    seen(stack, xs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mhc_ops.metrics(stack) as health:
            run(stack, xs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            health.result()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert health.result()


@pytest.mark.gpu
def test_tilelang():
    """It has no maps alone: Triton makes them."""
    needs("tilelang")
    xs = batches(CUDA)
    of = lambda backend: HyperStack(*connections(place=(backend, "cuda"), layer_norm=False))  # noqa: E731
    assert seen(of("tilelang"), xs) == pytest.approx(seen(of("triton"), xs), rel=1e-4, abs=1e-6)


def test_torch_compile(stack):
    """What is compiled runs eagerly while it is watched, under the names of the model, and is not compiled again."""
    x, _ = batches()
    expected = seen(stack, [x])
    counter = CompileCounter()
    compiled = torch.compile(stack, backend=counter, fullgraph=True)
    outputs = []
    for model in (None, stack, compiled, None):
        stack.zero_grad()
        with mhc_ops.metrics(model) if model is not None else nullcontext() as health:
            outputs.append(compiled(x))
            outputs[-1].float().square().sum().backward()
        assert health is None or health.result() == expected
    assert counter.frame_count == 1 and torch.equal(outputs[0], outputs[-1])
    for connection in stack:
        connection.layer = torch.compile(connection.layer, backend="eager", fullgraph=True)
    stack.zero_grad()
    assert seen(stack, [x]) == expected


@pytest.mark.parametrize("own", [None, "eager_on_recompile"])
def test_contexts_in_any_order(own):
    """Of two contexts the first ends first: torch.compile works again after the last. A stance set within stays."""
    one, other = (mhc_ops.metrics(connections(depth=1)[0]) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    now = torch.compiler.set_stance("default")
    now.__exit__(None, None, None)
    assert now.prev.stance == "force_eager"
    if own is not None:
        torch.compiler.set_stance(own)
    other.__exit__(None, None, None)
    assert torch.compiler.set_stance("default").prev.stance == (own or "default")


def test_connections_that_are_compiled_within(monkeypatch):
    """As by a torch.compile that is imported within: what it compiles is not seen, which is no result without it."""
    monkeypatch.setattr(private, "may_have_compiled", lambda: False)
    stack, (x, _) = nn.Sequential(*connections()), batches()
    with mhc_ops.metrics(stack) as health:
        stack[1].compile(backend="eager", fullgraph=True)
        stack(x)
    with pytest.raises(RuntimeError, match=r"torch.compile compiled 1 within the context.*: compile before"):
        health.result()


def test_torch_func(stack):
    """What it runs is not seen."""
    x, _ = batches()
    with mhc_ops.metrics(stack) as health:
        torch.func.grad(lambda x: stack(x).sum())(x)
    with pytest.raises(RuntimeError, match=r"no connection of the model ran.* only under torch.func.*: call the model"):
        health.result()
