"""HyperConnection and HyperStack in what torch puts around them: autocast, compile, checkpoint, export.
tests/core/test_graphs.py has CUDA graphs, tests/distributed/test_fsdp.py FSDP2."""

import pytest
import torch
from mhc_kernels import bf16, fp32
from networks import MODELS, D, N, step, streams, trained_maps
from recorded import Recorded
from stack_results import assert_close, assert_equal, gradients, random_cotangents
from torch import nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from mhc_ops import HyperStack, MHCBlock
from mhc_ops.mhc import prepare
from mhc_ops.mhc.contracts import mhc_next_fwd
from mhc_ops.testing import accuracy, cases

by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
MODULES = {**MODELS, "block": lambda place, **_: trained_maps(MHCBlock(N, D, backend=place[0]).to(place[1]))[0]}
by_module = pytest.mark.parametrize("model", MODULES.values(), ids=MODULES)
COMPILED = [("block", 1, "aot_eager"), ("block", 1, "inductor"), ("layers", 1, "aot_eager"), ("layers", 2, "inductor")]
COMPILED += [("stack", 2, "inductor"), ("recompute", 2, "aot_eager"), ("shifted", 2, "aot_eager")]


@pytest.mark.parametrize(("kind", "depth", "compiler"), COMPILED)
def test_compile(kind, depth, compiler, place, cxx):
    """One graph, forward and backward, and no second one for another number of tokens; recompute keeps everything
    there. Kernels keep their bits; a compiled layer may not."""
    torch.compiler.reset()
    network, x = MODULES[kind](place, depth=depth), streams(place)
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=compiler)
    check = assert_equal if kind == "block" and place[0] == "triton" else assert_close
    check(step(compiled, x), step(network, x))
    longer = torch.cat([x.detach()] * 2).requires_grad_()
    with torch.compiler.set_stance("fail_on_recompile"):
        check(step(compiled, longer), step(network, longer))


@by_module
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(reentrant, model, place):
    network, x = model(place), streams(place)
    out = checkpoint(network, x, use_reentrant=reentrant)
    outputs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(outputs, random_cotangents(outputs))
    assert_equal([*outputs, x.grad, *(p.grad for p in network.parameters())], step(network, streams(place)))


@by_model
def test_checkpoint_option(model, place):
    """The same bits; a connection keeps its input and nothing else."""
    kept = []
    plain, saving = model(place), model(place, checkpoint=True)
    assert_equal(step(saving, streams(place)), step(plain, streams(place)))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        saving[0](streams(place))
    parameters = {parameter.data_ptr() for parameter in saving.parameters()}
    shapes = [tuple(tensor.shape) for tensor in kept if tensor.numel() and tensor.data_ptr() not in parameters]
    assert shapes in ([], [(2, 4, N, D)])


@by_model
def test_autocast(model, place):
    """The layers run in bf16; streams, maps and gradients stay fp32. A stack has the bits of the sequential."""
    network, x, seen = model(place), streams(place), []
    network[0].layer.down.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast(place[1], bf16):
        out = network(x)
    assert seen == [bf16] and out.dtype == fp32
    leaves = [x, *network.parameters()]
    found = gradients(out, leaves)
    assert [(t.dtype, t.shape) for t in found[1:]] == [(t.dtype, t.shape) for t in leaves]
    assert all(t.isfinite().all() for t in found)
    if isinstance(network, HyperStack) and not network.shifted:
        with torch.autocast(place[1], bf16):
            out = nn.Sequential(*network)(x)
        assert_equal(found, gradients(out, leaves))


@by_module
def test_inference_mode(model, place):
    network, x = model(place), streams(place)
    expected = network(x)
    with torch.inference_mode():
        assert_equal(network(x.detach()), expected)
    assert_equal(network(x.detach()), expected)


@by_module
def test_export(model, place):
    network, x = model(place).requires_grad_(False), streams(place).detach()
    assert_close(torch.export.export(network, (x,)).module()(x), network(x))


@pytest.mark.gpu
@by_model
def test_the_host_does_not_wait(model):
    """A number copied to the GPU would make it wait. A shifted stack once copied one in every step."""
    place = ("triton", "cuda")
    network, x = model(place), streams(place)
    network(x).square().sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        network(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_link_stays_one_element(kernel_device):
    """A copy of it would be as large as x."""
    x = torch.zeros(6, N, D, device=kernel_device)
    maps = {"h_out": x[:, 0], "h_post": x[:, :, 0], "h_res": torch.zeros(6, N, N, device=kernel_device)}
    link = torch.empty_strided(x.shape, (0, 0, 0), device=kernel_device)
    request = prepare.leave(function="mhc_layer", link=link, x=x, **maps, backend="triton")
    assert request.op.laid_out(request.inputs)["link"] is link and mhc_next_fwd.taken("link", link) is link


OF_EACH_OP = (*cases.SUBJECTS[2:], *cases.OF_THE_STACK[:4], *cases.VARIANTS)
WITHOUT_GAMMA = (cases.MHC_PRE, cases.MHC_LAYER.with_options(transposed=True))
OPS = [cases.Case(subject, (6,), N, D, fp32) for subject in OF_EACH_OP]
OPS += [cases.Case(subject, (6,), N, D, fp32, gamma=False) for subject in WITHOUT_GAMMA]


@pytest.mark.parametrize("case", OPS, ids=str)
def test_opcheck(case, kernel_device):
    """Each op that a call and its gradient are made of, as they call it."""
    with Recorded("mhc_ops") as recorded:
        accuracy.run_case(case, "triton", kernel_device)
    assert recorded.calls
    for op, given in recorded.calls:
        is_forward = not op.name().endswith("_bwd")
        opcheck(op, [t.detach().requires_grad_(is_forward) if isinstance(t, torch.Tensor) else t for t in given])
