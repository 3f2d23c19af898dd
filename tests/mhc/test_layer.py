"""HyperConnection and HyperStack in what torch puts around them: autocast, compile, checkpoint, export, FSDP2, CUDA
graphs."""

import copy

import processes
import pytest
import torch
from mhc_kernels import bf16, fp32
from networks import MLP, MODELS, D, N, connections, layers_and_head, step, streams, trained_maps
from stack_results import assert_close, assert_equal, gradients, random_cotangents
from torch import nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.mhc import contracts, prepare
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import cases

OPTIONS = tuple(PreOptions())
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@by_model
def test_gradients(model, place):
    """Against the reference in fp64."""
    exact = model(("reference", place[1]), depth=2).double()
    assert_close(step(model(place, depth=2), streams(place)), step(exact, streams(place, torch.float64)))


def test_streams_used_elsewhere_too(place):
    def dx(network, x):
        return torch.autograd.grad((network(x) + x.square().mean(-2)).sum(), x)[0]

    exact = dx(layers_and_head(("reference", place[1])).double(), streams(place, torch.float64))
    assert_close([dx(layers_and_head(place), streams(place))], [exact])


@pytest.mark.parametrize(
    ("kind", "depth", "compiler"),
    [("layers", 1, "aot_eager"), ("layers", 2, "inductor"), ("recompute", 2, "aot_eager"), ("stack", 2, "inductor"),
     ("shifted", 2, "aot_eager")],
)  # fmt: skip
def test_compile(kind, depth, compiler, place, cxx):
    """One graph, dynamic in the tokens; recompute keeps everything there."""
    torch.compiler.reset()
    network, x = MODELS[kind](place, depth=depth), streams(place)
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=compiler)
    for given in (x, torch.cat([x.detach()] * 2).requires_grad_()):
        assert_close(step(compiled, given), step(network, given))


def test_compile_with_a_graph_break_in_the_layer(place):
    torch.compiler.reset()

    class Broken(MLP):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    network, x = layers_and_head(place, depth=2), streams(place)
    broken = layers_and_head(place, depth=2, layer=Broken)
    assert_close(step(torch.compile(broken, backend="aot_eager"), x), step(network, x))


@by_model
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(reentrant, model, place):
    network, x = model(place), streams(place)
    out = checkpoint(network, x, use_reentrant=reentrant)
    out.backward(*random_cotangents([out]))
    assert_equal([x.grad, *(p.grad for p in network.parameters())], step(network, streams(place))[1:])


@by_model
def test_checkpoint_option(model, place):
    """The same bits; a connection keeps its input and nothing else."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    plain, saving = model(place), model(place, checkpoint=True)
    assert_equal(step(saving, streams(place)), step(plain, streams(place)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        saving[0](streams(place))
    parameters = {parameter.data_ptr() for parameter in saving.parameters()}
    kept = [tensor for tensor in kept if tensor.numel() and tensor.data_ptr() not in parameters]
    assert [tuple(tensor.shape) for tensor in kept] in ([], [(2, 4, N, D)])


@by_model
def test_autocast(model, place):
    """The layers run in bf16; streams, maps and gradients stay fp32."""
    network, x, seen = model(place), streams(place), []
    network[0].layer.down.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast(place[1], bf16):
        out = network(x)
    assert seen == [bf16]
    assert out.dtype == fp32
    leaves = [x, *network.parameters()]
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
        assert gradient.isfinite().all()


def test_autocast_of_a_stack(place):
    """The bits of the sequential."""
    made, x = connections(place), streams(place)
    with torch.autocast(place[1], bf16):
        outputs = [n(x) for n in (nn.Sequential(*made), HyperStack(*made), HyperStack(*made, recompute=2))]
    leaves = [x, *(p for connection in made for p in connection.parameters())]
    expected, *results = (gradients(out, leaves) for out in outputs)
    for result in results:
        assert_equal(result, expected)


@by_model
def test_inference_mode(model, place):
    network, x = model(place), streams(place)
    with torch.inference_mode():
        result = network(x.detach())
    assert_equal([result, network(x.detach())], [network(x)] * 2)


@by_model
def test_export(model, place):
    network, x = model(place).requires_grad_(False), streams(place).detach()
    assert_close([torch.export.export(network, (x,)).module()(x)], [network(x)])


@pytest.mark.gpu
@by_model
def test_cuda_graph(model):
    place = ("triton", "cuda")
    network = model(place)
    expected = step(network, streams(place))
    # A leaf that took part in a graph on another stream would tie its gradient to that stream, which capture refuses.
    x = streams(place)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(network), (x,))
    assert_equal(step(graphed, x), expected)


@pytest.mark.gpu
@by_model
def test_the_host_does_not_wait(model):
    """A number copied to the GPU would make it wait, and such a step could not be captured."""
    place = ("triton", "cuda")
    network, x = model(place), streams(place)
    network(x).square().sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        network(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sharded(kind, backend):
    """On each process of test_fsdp2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    place = (backend, "cpu")
    network = MODELS[kind](place, depth=2)
    mesh, policy = torch.distributed.init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(cast_forward_inputs=False)
    for connection in network:
        fully_shard(connection, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    x = streams(place)
    with mhc_ops.metrics(network) as health:
        network(x).square().sum().backward()  # the same x everywhere, so the mean over processes is the gradient
    whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in network.parameters()]
    return [x.grad, *whole], health.result()


@pytest.mark.parametrize("kind", ["layers", "recompute"])
@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.interpreted, id="interpreted")]
)
def test_fsdp2(backend, kind):
    """Two processes, every connection sharded over them."""
    (found, numbers), _ = processes.run(2, sharded, kind, backend)
    network, x = MODELS[kind]((backend, "cpu"), depth=2), streams((backend, "cpu"))
    with mhc_ops.metrics(network) as health:
        network(x).square().sum().backward()
    assert_close(found, [x.grad, *(p.grad for p in network.parameters())])
    assert numbers == pytest.approx(health.result(), rel=1e-5, abs=1e-6)


# The ops


def test_the_link_stays_one_element(kernel_device):
    """A copy of it would be as large as x."""
    x = torch.zeros(6, N, D, device=kernel_device)
    maps = {"h_out": x[:, 0], "h_post": x[:, :, 0], "h_res": torch.zeros(6, N, N, device=kernel_device)}
    link = torch.empty_strided(x.shape, (0, 0, 0), device=kernel_device)
    request = prepare.leave(function="mhc_layer", link=link, x=x, **maps, backend="triton")
    taken = request.op.laid_out(request.inputs)
    assert taken["link"] is link
    assert taken["h_out"].is_contiguous()


@pytest.mark.parametrize(("gamma", "norm"), [(False, False), (True, True)])
def test_opcheck(gamma, norm, kernel_device):
    """The private pair, the boundary, and the ops that their gradients are made of."""
    tensors = cases.Case(cases.MHC_LAYER, (6,), N, D, torch.float32, gamma=gamma).inputs(kernel_device)
    x, h_out, *parameters = (tensors.get(name) for name in cases.MHC_LAYER.inputs)
    parameters.append(torch.rand(D, device=kernel_device) if norm else None)
    leaves = [t if t is None else t.requires_grad_() for t in (x, *parameters)]
    read = torch.rand(6, N, device=kernel_device)
    shifted = (None, read.requires_grad_()) if gamma and norm else (None,)
    for given in shifted:
        opcheck(contracts.mhc_layer_pre.traced, (leaves[0], given, *leaves[1:], *OPTIONS, "triton"))
    detached = [t if t is None else t.detach() for t in leaves]
    of_pre = (detached[0], None, *detached[1:], *OPTIONS, "triton")
    h_in, h_post, h_res, link, _, inv_rms, h_mix = contracts.mhc_layer_pre.traced(*of_pre)
    maps = [t.requires_grad_() for t in (h_out, h_post, h_res)]
    opcheck(contracts.mhc_layer_post.traced, (link, x.detach(), *maps, gamma, "triton"))  # transposed or not
    opcheck(contracts.mhc_post_fwd.traced, (x, *maps, norm, "triton"))
    opcheck(contracts.mhc_post_fwd.traced, (x, *maps[:2], None, False, "triton"))
    opcheck(contracts.mhc_post_pre_fwd.traced, (x, *maps, *leaves[1:], *OPTIONS, "triton"))
    for given in shifted:
        of_next = (link, x.detach(), *maps, given, *leaves[1:], *OPTIONS, True, "triton")
        opcheck(contracts.mhc_next_fwd.traced, of_next)
    opcheck(contracts.sinkhorn_fwd.traced, (h_res.detach().requires_grad_(), 20, 1e-6, "triton"))
    plain = [t.detach() for t in maps]
    opcheck(contracts.mhc_next_fwd.traced, (None, detached[0], *plain, None, *detached[1:], *OPTIONS, False, "triton"))
    opcheck(contracts.mhc_post_bwd.traced, (detached[0], *plain, False, detached[0], True, "triton"))
    for given in [None if weights is None else weights.detach() for weights in shifted]:
        kept = (*OPTIONS, given, inv_rms, h_mix)
        cotangents = (h_in, plain[1], plain[2], given, detached[0])
        opcheck(contracts.mhc_pre_bwd.traced, (*detached, *kept, *cotangents, "triton"))
        of_next = (*plain, given, *detached[1:], *OPTIONS, detached[0], inv_rms, h_mix, detached[0], *cotangents)
        opcheck(contracts.mhc_next_bwd.traced, (detached[0], *of_next, "triton"))


@pytest.mark.parametrize("gamma", [False, True])
def test_opcheck_of_pre_and_its_parts(gamma, kernel_device):
    tensors = cases.Case(cases.MHC_PRE, (6,), N, D, torch.float32, gamma=gamma).inputs(kernel_device)
    leaves = [t if t is None else t.requires_grad_() for t in (tensors.get(name) for name in cases.MHC_PRE.inputs)]
    opcheck(contracts.mhc_maps_fwd.traced, (*leaves, *OPTIONS, "triton"))
    opcheck(contracts.mhc_pre_fwd.traced, (*leaves, None, *OPTIONS, "triton"))
    detached = [t if t is None else t.detach() for t in leaves]
    h_pre, h_post, h_res, inv_rms, h_mix = contracts.mhc_maps_fwd.traced(*detached, *OPTIONS, "triton")
    kept = (inv_rms, h_mix, h_pre, h_post, h_res)
    opcheck(contracts.mhc_maps_bwd.traced, (*detached, *OPTIONS, *kept, "triton"))
    of_pre = (None, inv_rms, h_mix, detached[0][:, 0].clone(), h_post, None, None, None)
    opcheck(contracts.mhc_pre_bwd.traced, (*detached, None, *OPTIONS, *of_pre, "triton"))
    opcheck(contracts.mhc_read_fwd.traced, (leaves[0], h_pre.requires_grad_(), "triton"))
    opcheck(contracts.mhc_read_bwd.traced, (detached[0], h_pre.detach(), detached[0][:, 0].clone(), "triton"))
    opcheck(contracts.mhc_mean_fwd.traced, (leaves[0], N, "triton"))
    opcheck(contracts.mhc_mean_bwd.traced, (N, detached[0][:, 0].clone(), "triton"))


# The layer


def test_a_layer_that_returns_more(place):
    """(h_out, *rest) becomes (x_next, *rest), and extras reach the layer, also one that is named x."""
    backend, device = place

    def layer(h, scale, *, x):
        return h * scale + x, "cache"

    (wrapped,) = trained_maps(HyperConnection(layer, N, D, backend=backend).to(device))
    x = streams(place)
    x_next, rest = wrapped(x, 2.0, x=1.0)
    assert rest == "cache"
    alone = HyperConnection(lambda h: h * 2.0 + 1.0, N, D, backend=backend).to(device)
    alone.load_state_dict(wrapped.state_dict())
    assert torch.equal(x_next, alone(x))
    saving = HyperConnection(layer, N, D, backend=backend, checkpoint=True).to(device)
    saving.load_state_dict(wrapped.state_dict())
    assert torch.equal(saving(x, 2.0, x=1.0)[0], x_next)


def test_mhc_layer_is_the_module(place):
    backend, device = place
    (module,) = trained_maps(HyperConnection(MLP(), N, D, gamma=True, backend=backend).to(device))
    x = streams(place)
    expected = mhc_ops.mhc_layer(x, module.layer, module.phi, module.alpha, module.bias, module.gamma, backend=backend)
    assert torch.equal(module(x), expected)
