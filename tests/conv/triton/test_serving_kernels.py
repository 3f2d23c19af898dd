"""The kernels that servers call: seen by torch, kept and replayed, captured in a graph, compiled once."""

from itertools import count, islice

import pytest
import torch
from serving_oracle import Draw

import mhc_ops
from mhc_ops.conv import ops
from mhc_ops.core import call
from mhc_ops.testing.cases import SEED

pytest.importorskip("triton")


def drawn(kind, *names, device):
    calls = (getattr(Draw(number), kind)() for number in count(SEED))
    given = next(found for found in calls if set(names) <= found.keys() and 0 < found["x"].numel() < 120)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


FORMS = [
    (mhc_ops.causal_conv1d_prefill, "prefill", ("block_size",), ""),
    (mhc_ops.causal_conv1d_update, "step", ("num_accepted_tokens", "cu_seqlens", "write_columns"), "x"),
    (mhc_ops.causal_conv1d_update, "step", ("parents",), "out"),
    (mhc_ops.causal_conv1d_update, "step", ("num_accepted_tokens",), ""),  # neither out nor, in most, windows
]
by_form = pytest.mark.parametrize(("function", "kind", "names", "out"), FORMS)


def calls(function, kind, names, out, device):
    """The call, and others like it with memory of their own; y is new, another tensor or x itself."""
    given = drawn(kind, *names, device=device)
    while True:
        own = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        own |= {"": {}, "x": {"out": own["x"]}, "out": {"out": torch.empty_like(own["x"])}}[out]
        yield own | {"backend": "triton"}


@by_form
def test_opcheck(function, kind, names, out, kernel_device, monkeypatch):
    requests = []
    monkeypatch.setattr(ops, "run", lambda prepare, **arguments: requests.append(prepare(**arguments)))
    function(**next(calls(function, kind, names, out, kernel_device)))
    (request,) = requests
    arguments = (*request.op.flattened(request.op.laid_out(request.inputs)), "triton")
    torch.library.opcheck(request.op.traced, arguments)


@by_form
def test_compiled_and_kept(function, kind, names, out, kernel_device, cxx):
    """One graph, with what is written in place. An eager call like an earlier one is found again, on a GPU replayed."""
    first, second, third = islice(calls(function, kind, names, out, kernel_device), 3)
    call.forget()
    expected, again = function(**first), function(**second)
    (kept,) = call.kept_calls()
    if kernel_device == "cuda":
        (plan,) = kept.call.replayed.plans.values()
        assert plan is not None
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(**third)
    for y, arguments in ((again, second), (compiled, third)):
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        for name in {"conv_state", "windows", "x"} & arguments.keys():
            torch.testing.assert_close(arguments[name], first[name], rtol=0, atol=0, equal_nan=True)


def test_memory_that_is_shared_is_seen_in_every_call(kernel_device):
    """A kept call has checked other tensors: x within the memory of out is copied, a state within it is refused."""
    pool, weight = torch.randn(2, 64, device=kernel_device), torch.randn(8, 4, device=kernel_device)
    x, state = pool[:, :8], pool[:, 16:40].view(2, 8, 3)

    def step(state, out):
        return mhc_ops.causal_conv1d_update(x, state.clone(), weight, out=out, backend="triton")

    y = step(state, torch.empty_like(pool)[:, :8])
    assert torch.equal(step(state, pool[:, 8:16]), y)
    with pytest.raises(ValueError, match="conv_state and out must not share memory"):
        mhc_ops.causal_conv1d_update(x, state, weight, out=pool[:, 16:24], backend="triton")
    apart = pool.clone()[:, 16:40].view(2, 8, 3)  # as the state is
    mhc_ops.causal_conv1d_update(x, apart, weight, out=pool[:, 16:24], backend="triton")
    with pytest.raises(ValueError, match="conv_state and out must not share memory"):
        mhc_ops.causal_conv1d_update(x, state, weight, out=pool[:, 16:24], backend="triton")


@pytest.mark.gpu
def test_a_graph_takes_other_sequences():
    """Captured once for 64 rows and 8 sequences, replayed for fewer and shorter ones, and for null slots."""
    D, W, rows, N = 512, 4, 64, 8
    x, weight = torch.randn(rows, D, device="cuda", dtype=torch.bfloat16), torch.randn(D, W, device="cuda")
    cache = torch.zeros(20, D, W + 2, device="cuda", dtype=torch.bfloat16)
    bounds, slots = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (N + 1, N))
    goes_on, accepted = torch.zeros(N, dtype=torch.bool, device="cuda"), torch.ones(N, dtype=torch.int32, device="cuda")

    def steps(cache, x):
        options = {"activation": "silu", "pad_slot_id": 0, "cu_seqlens": bounds, "conv_state_indices": slots}
        y = mhc_ops.causal_conv1d_prefill(x, cache, weight, has_initial_state=goes_on, **options)
        return y, mhc_ops.causal_conv1d_update(
            x, cache, weight, num_accepted_tokens=accepted, max_seqlen=4, **options, out=torch.empty_like(x)
        )

    steps(cache.clone(), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps(cache, x)
    for number in range(5):
        generator = torch.Generator().manual_seed(SEED + number)
        lengths = torch.randint(0, 5, (N,), generator=generator)
        bounds[1:] = lengths.cumsum(0)
        slots.copy_(torch.randperm(20, generator=generator)[:N])
        goes_on.copy_(torch.rand(N, generator=generator) < 0.5)
        x.normal_()
        other = cache.clone()
        graph.replay()
        assert all(torch.equal(one, two) for one, two in zip(captured, steps(other, x)))
        assert torch.equal(cache, other)
