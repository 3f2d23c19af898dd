"""Ops as torch's dispatcher calls them, with launches that do nothing: from code that torch.compile wrote they pass
through it once, a second call binds no kernel, and another number of tokens compiles nothing."""

import sys

import processes
import pytest
import torch
from no_launches import launching_nothing, no_launches  # noqa: F401 (the second is a fixture)
from recorded import Recorded
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, HyperStack, ShortConv
from mhc_ops.core import private
from mhc_ops.mhc.contracts import mhc_mean_fwd

pytest.importorskip("triton")
n, D = 4, 256
OP = torch.ops.mhc_ops.mhc_mean_fwd.default


def streams(tokens, **options):
    return torch.zeros(tokens, n, D, dtype=torch.bfloat16, **options)


def mean(x):
    return mhc_mean_fwd.traced(x, n, "triton")


def stack(depth=2, **options):
    made = (HyperConnection(nn.Identity(), n, D, backend="triton", layer_norm=True) for _ in range(depth))
    return HyperStack(*made, **options)


def functions_called(function, *arguments):
    names = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name) if event == "call" else None)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return names


TWICE = {"forward_no_grad", "backend_impl"}  # what torch.library.custom_op puts between


def test_a_call_without_gradients_passes_the_dispatcher_once(no_launches):  # noqa: F811
    x = streams(8)
    mean(x)
    assert not TWICE & functions_called(mean, x)
    with torch.no_grad():
        assert not TWICE & functions_called(mean, x.requires_grad_())
    assert mean(x).requires_grad and "backend_impl" in functions_called(mean, x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
def test_what_watches_sees_the_op(no_launches):  # noqa: F811
    """A mode, fake tensors, functionalization and vmap; a view that is negated by a bit is resolved first."""
    x = streams(8)
    mean(x)
    with Recorded() as recorded:
        mean(x)
    assert OP in [func for func, _ in recorded.calls]
    with FakeTensorMode() as mode:
        assert isinstance(mean(mode.from_tensor(x)), FakeTensor)
    traced = torch.fx.experimental.proxy_tensor.make_fx(torch.func.functionalize(mean))(x)
    assert OP in [node.target for node in traced.graph.nodes]
    mapped = torch.func.vmap(lambda x: mhc_ops.mhc_mean(x, backend="triton"))
    assert mapped(x.view(2, 4, n, D)).shape == (2, 4, D)
    assert "backend_impl" in functions_called(mean, torch._neg_view(x))


def test_a_compiler_does_not_trace_the_kernel(no_launches):  # noqa: F811
    """Where a frame that torch.compile leaves to Python calls the op, it would trace the functions that this calls."""
    counter = CompileCounter()

    @torch._dynamo.disable(recursive=False)
    def left_alone(x):
        return OP(x, n, "triton")

    torch.compiler.reset()
    torch.compile(lambda x: left_alone(x), backend=counter)(streams(8))
    assert counter.frame_count == 0


def convolved(x):
    weight = torch.zeros(D, 4, dtype=x.dtype)
    return mhc_ops.causal_conv1d(x.view(-1, n, D), weight, activation="silu", backend="triton")


def updated(x):
    state, weight = torch.zeros(len(x), D, 3, dtype=x.dtype), torch.zeros(D, 4, dtype=x.dtype)
    return mhc_ops.causal_conv1d_update(x[:, 0], state, weight, backend="triton")


COMPILED = {
    "connection": lambda: HyperConnection(nn.Linear(D, D, dtype=torch.bfloat16), n, D, backend="triton"),
    "stack": stack,
    "shifted": lambda: stack(shifted=True),
    "recompute": lambda: stack(recompute=2),
    "head": lambda: HyperHead(n, D, backend="triton"),
    "short_conv": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), ShortConv(n, D, backend="triton")),
    "convolution": lambda: convolved,
    "update": lambda: updated,
}


def steps(function, kernels, sizes):
    """Forward and backward for each number of tokens, three times; the kernels that the last one bound. torch calls
    the kernel of the device itself in the step that compiles: the next one binds once more."""
    again = []
    for tokens in sizes:
        for _ in range(3):
            before, x = len(kernels), streams(tokens, requires_grad=True)
            out = function(x if function is not updated else x.detach())
            if out.requires_grad:
                out.float().sum().backward()
        again += kernels[before:]
    return again


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_binds_once_and_is_compiled_once(name, no_launches):  # noqa: F811
    torch.compiler.reset()
    compiled = torch.compile(COMPILED[name](), fullgraph=True, dynamic=True, backend="aot_eager")
    assert steps(compiled, no_launches, (1024,)) == [] and no_launches
    with torch.compiler.set_stance("fail_on_recompile"):
        assert steps(compiled, no_launches, (2048, 1536)) == []


@pytest.mark.parametrize("told", [True, False])
def test_inductor_is_told_of_every_op(told, no_launches, cxx, monkeypatch):  # noqa: F811
    """Where torch before 2.13 finds an op out itself, a stack of six takes minutes to compile."""
    from torch._inductor import config, graph

    torch.compiler.reset()
    for op in [op for op in graph.lowerings if str(op).startswith("mhc_ops.")]:
        monkeypatch.delitem(graph.lowerings, op)
    monkeypatch.setattr(graph.log, "info", lambda message, *values: messages.append(message))
    monkeypatch.setattr(private, "PRINTS_ARGUMENTS", told)
    messages = []
    with config.patch(force_disable_caches=True):
        assert steps(torch.compile(stack(), fullgraph=True), no_launches, (1024,)) == []
    assert told is not any("implicit fallback" in message for message in messages)


def test_an_inductor_that_cannot_be_told(monkeypatch):
    """Code compiles all the same, and the name is told, once."""
    from torch._inductor import graph

    monkeypatch.setattr(private, "PRINTS_ARGUMENTS", True)
    monkeypatch.setattr(private, "missing", [])
    monkeypatch.delattr(graph, "make_fallback")
    monkeypatch.delitem(graph.lowerings, OP, raising=False)
    for _ in range(2):
        private.lower_as_a_call(OP)
    assert private.missing == ["module 'torch._inductor.graph' has no attribute 'make_fallback'"]


@pytest.mark.thorough
def test_inductor_and_aot_inductor_bind_once(no_launches, cxx, tmp_path):  # noqa: F811
    torch.compiler.reset()
    assert steps(torch.compile(stack(), fullgraph=True, dynamic=True), no_launches, (1024, 2048)) == []
    tokens = torch.export.Dim("tokens", min=1024, max=4096)
    program = torch.export.export(stack().requires_grad_(False), (streams(1024),), dynamic_shapes=({0: tokens},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "stack.pt2"))
    for function in (program.module(), torch._inductor.aoti_load_package(package)):
        function(streams(1536))
        bound = len(no_launches)
        assert function(streams(1536)).shape == (1536, n, D) and len(no_launches) == bound


def sharded():
    """In one process: a DTensor, and a stack under FSDP2, each compiled."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, policy = torch.distributed.init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(cast_forward_inputs=False)
    with launching_nothing(pytest.MonkeyPatch()) as kernels:
        compiled = torch.compile(lambda x: mhc_ops.mhc_mean(x, backend="triton"), backend="aot_eager", fullgraph=True)
        for _ in range(3):
            before, out = len(kernels), compiled(distribute_tensor(streams(8), mesh, [Shard(0)]))
            assert out.placements == (Shard(0),)
        assert kernels and len(kernels) == before
        network = stack(2)
        for connection in network:
            fully_shard(connection, mesh=mesh, mp_policy=policy)
        network = torch.compile(fully_shard(network, mesh=mesh, mp_policy=policy), backend="aot_eager")
        assert steps(network, kernels, (1024,)) == []


@pytest.mark.thorough
def test_dtensor_and_fsdp2_compiled_bind_once():
    processes.run(1, sharded)
