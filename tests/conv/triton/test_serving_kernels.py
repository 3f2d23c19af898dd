"""The kernels that servers call: seen by torch, kept and replayed, captured in a graph, compiled once."""

from itertools import count

import pytest
import torch
from serving_oracle import Draw

import mhc_ops
from mhc_ops.conv import ops
from mhc_ops.core import call
from mhc_ops.testing.cases import SEED

pytest.importorskip("triton")


def drawn(kind, *names, device):
    """A random call of this kind that has these arguments."""
    calls = (getattr(Draw(number), kind)() for number in count(SEED))
    given = next(found for found in calls if set(names) <= found.keys() and 0 < found["x"].numel() < 120)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


FORMS = [
    (mhc_ops.causal_conv1d_prefill, "prefill", ("block_size",), ""),
    (mhc_ops.causal_conv1d_update, "step", ("num_accepted_tokens", "cu_seqlens", "write_columns"), "x"),
    (mhc_ops.causal_conv1d_update, "step", ("parents",), "out"),
]


def with_out(given, out):
    """The call, with a tensor for y that is new or x itself."""
    return given | {"": {}, "x": {"out": given["x"]}, "out": {"out": torch.empty_like(given["x"])}}[out]


def copied(given):
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return copies | ({"out": copies["x"]} if given.get("out") is given["x"] else {})


@pytest.mark.parametrize(("function", "kind", "names", "out"), FORMS)
def test_opcheck(function, kind, names, out, kernel_device, monkeypatch):
    requests = []
    monkeypatch.setattr(ops, "run", lambda prepare, **arguments: requests.append(prepare(**arguments)))
    function(**with_out(drawn(kind, *names, device=kernel_device), out), backend="triton")
    (request,) = requests
    arguments = (*request.op.flattened(request.op.laid_out(request.inputs)), "triton")
    torch.library.opcheck(request.op.traced, arguments)


@pytest.mark.parametrize(("function", "kind", "names", "out"), FORMS)
def test_compiled_and_kept(function, kind, names, out, kernel_device, cxx):
    """torch.compile, whole graph: what is written in place too. An eager call like an earlier one is found again."""
    given = with_out(drawn(kind, *names, device=kernel_device), out)
    eager, again, compiled = (copied(given) for _ in range(3))
    call.forget()
    results = [function(**arguments, backend="triton") for arguments in (eager, again)]
    assert len(call.kept_calls()) == 1
    results.append(torch.compile(function, fullgraph=True, backend="aot_eager")(**compiled, backend="triton"))
    for y, arguments in zip(results, (eager, again, compiled)):
        torch.testing.assert_close(y, results[0], rtol=0, atol=0, equal_nan=True)
        for name in ("conv_state", "windows", "x"):
            if name in given:
                torch.testing.assert_close(arguments[name], eager[name], rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "kind", "names", "out"), FORMS)
def test_replayed(function, kind, names, out):
    given = with_out(drawn(kind, *names, device="cuda"), out)
    first, second = copied(given), copied(given)
    call.forget()
    results = [function(**arguments, backend="triton") for arguments in (first, second)]
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(first["conv_state"], second["conv_state"], rtol=0, atol=0, equal_nan=True)
    (kept,) = call.kept_calls()
    (plan,) = kept.call.fill.plans.values()
    assert plan is not None
