"""metrics: what it says is true, and the model does not notice."""

from contextlib import nullcontext

import pytest
import stack_oracle as oracle
import torch
from mhc_kernels import needs
from stack_results import assert_equal
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.core import private

N, D, DEPTH = 3, 6, 3
PARAMETERS = ("phi", "alpha", "bias")
NAMES = {
    *(f"h_res_{what}" for what in ("row_error", "column_error", "entropy", "max")),
    *(f"h_{which}_{what}" for which in ("pre", "post") for what in ("mean", "min", "max")),
    *(f"saturated_{which}" for which in ("pre", "post", "res")),
    *(f"d{which}_norm" for which in PARAMETERS),
}
OPTIONS = {
    "sinkhorn": {},
    "transposed": {"transposed": True, "sinkhorn_iters": 2, "post_mult": 1.5, "norm_eps": 0.1},
    "identity": {"residual": "identity", "post_eps": 0.01, "hc_eps": 0.01},
}


class Layer(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def connections(residual="sinkhorn", place=("reference", "cpu"), dtype=torch.float32, depth=DEPTH, **further):
    """The same each time; logits to both sides of 6, and rows of h_res that do not sum to 1."""
    torch.manual_seed(0)
    options = {"gamma": True, "layer_norm": True, "backend": place[0], **OPTIONS[residual], **further}
    made = [HyperConnection(Layer(D, D, dtype=dtype), N, D, dtype=dtype, **options) for _ in range(depth)]
    with torch.no_grad():
        for connection in made:
            for parameter in connection.parameters(recurse=False):
                parameter.add_(torch.randn(parameter.shape, dtype=dtype))
            connection.bias.mul_(2.5)
    return [connection.to(place[1]) for connection in made]


def batches(dtype=torch.float32, device="cpu"):
    """Two passes, with different numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*outer, N, D, generator=generator).to(device, dtype) for outer in ((2, 3), (4,))]


def run(model, xs, call=None):
    """Outputs and gradients of a step with gradient accumulation."""
    outputs = [(call or model)(x) for x in xs]
    for output in outputs:
        output.float().square().sum().backward()
    return [*outputs, *(p.grad for p in model.parameters() if p.grad is not None)]


def seen(model, xs):
    with mhc_ops.metrics(model) as health:
        run(model, xs)
    return health.result()


# Against the equations in fp64.


def expected(made, xs, shifted):
    """All but the norms of gradients."""
    seen, composites = [{"z": [], "pre": [], "post": [], "res": []} for _ in made], []
    for x in xs:
        x = list(x.flatten(0, -3).unbind(1))
        read, composite = oracle.one_hot(x), torch.eye(N, dtype=torch.float64)
        for connection, of_one in zip(made, seen):
            own = {name: getattr(connection, name).detach() for name in (*PARAMETERS, "gamma")}
            options = connection.options
            of_one["z"].append(torch.cat(oracle.logits(x, len(own["bias"]), *own.values(), options["norm_eps"]), -1))
            h_pre, h_post, h_res = oracle.maps(x, **own, **options)
            of_one["pre"].append(torch.cat(h_pre, -1))
            of_one["post"].append(torch.cat(h_post, -1))
            if h_res is not None:
                of_one["res"].append(torch.stack([torch.cat(row, -1) for row in h_res], 1))
                composite = (of_one["res"][-1] if options["transposed"] else of_one["res"][-1].mT) @ composite
            with torch.no_grad():
                h_in = oracle.read(x, read if shifted else h_pre, connection.layer_norm_weight)
                x = oracle.write(x, connection.layer(h_in), h_post, h_res, options["transposed"])
            read = h_pre
        composites.append(composite.expand(len(x[0]), N, N))
    gains = torch.cat(composites).abs()
    found = {"gain_forward": gains.sum(-1).amax(-1).mean(), "gain_backward": gains.sum(-2).amax(-1).mean()}
    for number, of_one in enumerate(seen):
        values = {name: torch.cat(tensors) for name, tensors in of_one.items() if tensors}
        found |= {f"{number}/{name}": value for name, value in summary(**values).items()}
    return {name: float(value) for name, value in found.items()}


def summary(z, pre, post, res=None):
    found = {}
    for name, h in (("pre", pre), ("post", post)):
        found |= {f"h_{name}_mean": h.mean(), f"h_{name}_min": h.min(), f"h_{name}_max": h.max()}
    for name, rows in {"pre": z[:, :N], "post": z[:, N : 2 * N], "res": z[:, 2 * N :]}.items():
        found |= {f"saturated_{name}": (rows.abs() > 6).double().mean()} if rows.numel() else {}
    if res is not None:
        found |= {"h_res_row_error": (res.sum(-1) - 1).abs().max(), "h_res_max": res.max()}
        found |= {"h_res_column_error": (res.sum(-2) - 1).abs().max()}
        found |= {"h_res_entropy": -(res * res.log()).sum((-2, -1)).mean() / N}
    return found


def norms(made):
    """Norms of the gradients of a model that ran without metrics."""
    return {
        f"{number}/d{which}_norm": getattr(connection, which).grad.norm().item()
        for number, connection in enumerate(made)
        for which in PARAMETERS
    }


MODELS = {
    "alone": nn.Sequential,
    "stack": HyperStack,
    "shifted": lambda *made: HyperStack(*made, shifted=True),
    "recompute": lambda *made: HyperStack(*made, recompute=2),
}
of_any_kind = pytest.mark.parametrize("kind", MODELS)


@of_any_kind
@pytest.mark.parametrize("residual", OPTIONS)
def test_values(residual, kind):
    """After two passes with accumulated gradients."""
    model, xs = MODELS[kind](*connections(residual, dtype=torch.float64)), batches(torch.float64)
    found = seen(model, xs)
    unseen = MODELS[kind](*connections(residual, dtype=torch.float64))
    run(unseen, xs)
    truth = expected(list(model), xs, kind == "shifted") | norms(unseen)
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-12)
    for which in ("pre", "post"):
        assert any(0 < found[f"{i}/saturated_{which}"] < 1 for i in range(DEPTH))
    if residual == "identity":
        assert found["gain_forward"] == found["gain_backward"] == 1
        assert not any("res" in name for name in found)
    else:
        assert {name.partition("/")[2] for name in found if "/" in name} == NAMES
        assert max(found["gain_forward"], found["gain_backward"]) > 1.001
        assert abs(found["gain_forward"] - found["gain_backward"]) > 1e-3  # told apart


# The model does not notice.


def assert_unnoticed(made, xs):
    """made: makes the same model in each call. Returns the numbers."""
    alone = run(made(), xs)
    model = made()
    with mhc_ops.metrics(model) as health:
        watched = run(model, xs)
    assert_equal(watched, alone)
    return health.result()


@of_any_kind
def test_nothing_changes(kind):
    assert_unnoticed(lambda: MODELS[kind](*connections()), batches())


def test_nothing_changes_in_kernels(kernel_device):
    """Few iterations: the interpreter takes its time."""
    pytest.importorskip("triton")
    made = lambda *place: HyperStack(*connections(place=place, sinkhorn_iters=2), recompute=2)  # noqa: E731
    xs = batches(device=kernel_device)[1:]
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
    assert found != exact
    assert found["2/h_res_column_error"] < 1e-5 > abs(found["gain_forward"] - 1)


@pytest.mark.parametrize("by", ["connection", "non-reentrant", "reentrant"])
def test_a_checkpoint_counts_once(by):
    """The first of two passes is run again in the backward: counted twice, it would move the means."""
    stack = HyperStack(*connections())
    with mhc_ops.metrics(stack) as health:
        first, second = (x.requires_grad_() for x in batches())
        if by == "connection":
            for connection in stack:
                connection.checkpoint = True
            out = stack(first)
            for connection in stack:
                connection.checkpoint = False
        else:
            out = checkpoint(stack, first, use_reentrant=by == "reentrant")
        out.square().sum().backward()
        stack(second).square().sum().backward()
    expected = seen(HyperStack(*connections()), batches())
    assert health.result() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_selective_checkpoint():
    """It keeps results of some operations, by the order in which they run, and takes them again in the backward."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sum.dim_IntList]

    def step(stack):
        ended = lambda x: stack(x).sum(-2).square()  # noqa: E731
        contexts = lambda: create_selective_checkpoint_contexts(saved)  # noqa: E731
        return run(stack, batches(), lambda x: checkpoint(ended, x, use_reentrant=False, context_fn=contexts))

    alone, stack = step(HyperStack(*connections())), HyperStack(*connections())
    with mhc_ops.metrics(stack):
        assert_equal(step(stack), alone)


def test_frozen_parameters():
    stack = HyperStack(*connections())
    stack[0].phi.requires_grad_(False)
    stack[1].requires_grad_(False)
    found = seen(stack, batches())
    norms = {name for name in found if "norm" in name}
    assert norms == {"0/dalpha_norm", "0/dbias_norm", "2/dphi_norm", "2/dalpha_norm", "2/dbias_norm"}


def hooks_of(model):
    return [
        (dict(module._forward_hooks), dict(module._forward_pre_hooks), dict(module._backward_hooks))
        for module in model.modules()
    ]


def test_nothing_stays():
    """Other hooks do; nor does anything of it stay when the model fails."""
    stack, called = HyperStack(*connections()), []
    stack[1].register_forward_hook(lambda *_: called.append(1))
    before = hooks_of(stack)
    seen(stack, batches())
    assert hooks_of(stack) == before and len(called) == 2
    with pytest.raises(ValueError, match="x must be"), mhc_ops.metrics(stack):
        assert hooks_of(stack) != before
        stack(torch.zeros(2, N + 1, D))
    assert hooks_of(stack) == before


def test_parts_of_a_model():
    """A connection alone has all numbers; the gain of all connections is that of calls of the model itself."""
    assert seen(connections(depth=1)[0], batches()).keys() == NAMES | {"gain_forward", "gain_backward"}
    stack, (x, y) = HyperStack(*connections()), batches()
    with mhc_ops.metrics(stack) as health:
        stack[2](x)
        stack[2](y)
    assert {name.partition("/")[0] for name in health.result()} == {"2"}
    with mhc_ops.metrics(stack) as health:
        stack(x)
        stack[2](x)
        stack[2](y)
    gains = ("gain_forward", "gain_backward")
    expected = seen(HyperStack(*connections()), [x])
    assert {name: health.result()[name] for name in gains} == {name: expected[name] for name in gains}


def test_calls_that_fail_or_have_no_tokens():
    """Their maps are no part of those of the next call."""

    def fail(layer, inputs):
        raise ArithmeticError

    stack, (x, _) = HyperStack(*connections()), batches()
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


# The host does not wait.


def test_no_number_is_read():
    stack, xs = HyperStack(*connections()), batches()
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_cpu) as profile, mhc_ops.metrics(stack) as health:
        run(stack, xs)
    names = {event.name for event in profile.events()}
    assert "aten::special_entr" in names  # it was watched
    assert names.isdisjoint({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
    assert health.result()


@pytest.mark.gpu
def test_the_host_does_not_wait():
    place = ("triton", "cuda")
    stack, xs = HyperStack(*connections(place=place)).cuda(), batches(device="cuda")
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
    xs = batches(device="cuda")
    of = lambda backend: HyperStack(*connections(place=(backend, "cuda"), layer_norm=False))  # noqa: E731
    assert seen(of("tilelang"), xs) == pytest.approx(seen(of("triton"), xs), rel=1e-4, abs=1e-6)


# Under torch.compile and torch.func.


def test_torch_compile():
    """What is compiled runs eagerly while it is watched, under the names of the model, and is not compiled again."""
    stack, (x, _) = HyperStack(*connections()), batches()
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
    assert counter.frame_count == 1
    assert torch.equal(outputs[0], outputs[-1])
    for connection in stack:
        connection.layer = torch.compile(connection.layer, backend="eager", fullgraph=True)
    stack.zero_grad()
    assert seen(stack, [x]) == expected


def stance():
    """The one of torch.compiler now."""
    now = torch.compiler.set_stance("default")
    now.__exit__(None, None, None)
    return now.prev.stance


@pytest.mark.parametrize("own", [None, "eager_on_recompile"])
def test_contexts_in_any_order(own):
    """Of two contexts the first ends first: torch.compile works again after the last. A stance set within stays."""
    one, other = (mhc_ops.metrics(connections(depth=1)[0]) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert stance() == "force_eager"
    if own is not None:
        torch.compiler.set_stance(own)
    other.__exit__(None, None, None)
    found = stance()
    torch.compiler.set_stance("default")
    assert found == (own or "default")


def test_connections_that_are_compiled_within(monkeypatch):
    """As by a torch.compile that is imported within: what it compiles is not seen, which is no result without it."""
    monkeypatch.setattr(private, "may_have_compiled", lambda: False)
    stack, (x, _) = nn.Sequential(*connections()), batches()
    with mhc_ops.metrics(stack) as health:
        stack[1].compile(backend="eager", fullgraph=True)
        stack(x)
    with pytest.raises(RuntimeError, match=r"torch.compile compiled 1 within the context.*: compile before"):
        health.result()


def test_torch_func():
    """What it runs is not seen."""
    stack, (x, _) = HyperStack(*connections()), batches()
    with mhc_ops.metrics(stack) as health:
        torch.func.grad(lambda x: stack(x).sum())(x)
    with pytest.raises(RuntimeError, match=r"no connection of the model ran.* only under torch.func.*: call the model"):
        health.result()
