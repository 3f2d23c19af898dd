"""HyperConnection in what torch puts around a layer: autocast, compile, checkpoint, export, FSDP2, CUDA graphs."""

import copy

import processes
import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import mhc_ops
from mhc_ops import HyperConnection, HyperHead
from mhc_ops.mhc import contracts, prepare
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import accuracy, cases

N, D = 3, 20
OPTIONS = tuple(PreOptions())


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference"),
        pytest.param(("triton", "cpu"), marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="gpu"),
    ]
)
def place(request):
    """A backend, and a device where it runs."""
    return request.param


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def trained_maps(module):
    """Away from the fresh state, so that every gradient is alive."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (HyperConnection, HyperHead)):
                part.phi.copy_(torch.randn(part.phi.shape, generator=generator) / part.phi.shape[1] ** 0.5)
                part.alpha.fill_(1.0)
    return module


def model(place, **options):
    backend, device = place
    torch.manual_seed(0)
    layers = [HyperConnection(MLP(), N, D, backend=backend, **options) for _ in range(2)]
    return trained_maps(nn.Sequential(*layers, HyperHead(N, D, backend=backend))).to(device)


def streams(place, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, N, D, generator=generator).to(place[1], dtype).requires_grad_()


def step(network, x):
    """Output, gradient of x, gradients of the parameters."""
    out = network(x)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return [out, *torch.autograd.grad(out, [x, *network.parameters()], cotangent)]


def assert_close(results, expected):
    assert all(accuracy.close(result, e.double()) for result, e in zip(results, expected, strict=True))


def test_gradients(place):
    """Two layers and a head against the reference in fp64."""
    exact = model(("reference", place[1])).double()
    assert_close(step(model(place), streams(place)), step(exact, streams(place, torch.float64)))


def test_streams_used_elsewhere_too(place):
    def dx(network, x):
        return torch.autograd.grad((network(x) + x.square().mean(-2)).sum(), x)[0]

    exact = dx(model(("reference", place[1])).double(), streams(place, torch.float64))
    assert_close([dx(model(place), streams(place))], [exact])


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile(compiler, place, cxx):
    """One graph, dynamic in the tokens."""
    torch.compiler.reset()
    network, x = model(place, sinkhorn_iters=3), streams(place)
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend=compiler)
    assert_close(step(compiled, x), step(network, x))
    longer = torch.cat([x.detach()] * 2).requires_grad_()
    assert_close(step(compiled, longer), step(network, longer))


def test_compile_with_a_graph_break_in_the_layer(place):
    torch.compiler.reset()

    class Broken(MLP):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    network, x = model(place), streams(place)
    broken = copy.deepcopy(network)
    for layer in broken[:2]:
        layer.layer.__class__ = Broken
    assert_close(step(torch.compile(broken, backend="aot_eager"), x), step(network, x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(reentrant, place):
    network, x = model(place), streams(place)

    def checkpointed(y):
        return checkpoint(network, y, use_reentrant=reentrant)

    out = checkpointed(x)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    out.backward(cotangent)
    expected = step(network, streams(place))
    assert torch.equal(x.grad, expected[1])
    assert all(torch.equal(p.grad, e) for p, e in zip(network.parameters(), expected[2:]))


def test_checkpoint_option(place):
    """Same bits, and nothing of a layer kept but its input."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    plain, saving = model(place), model(place, checkpoint=True)
    assert all(torch.equal(a, b) for a, b in zip(step(plain, streams(place)), step(saving, streams(place))))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        saving[0](streams(place))
    parameters = {parameter.data_ptr() for parameter in saving.parameters()}
    kept = [tensor for tensor in kept if tensor.numel() and tensor.data_ptr() not in parameters]
    assert [tuple(tensor.shape) for tensor in kept] in ([], [(2, 4, N, D)])


def test_autocast(place):
    """The layer runs in bf16, the streams and maps stay fp32."""
    network, x = model(place), streams(place)
    seen = []
    network[0].layer.down.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast(place[1], torch.bfloat16):
        out = network(x)
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32
    gradients = torch.autograd.grad(out.sum(), [x, *network.parameters()])
    expected = step(network, x)[1:]
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient.dtype, gradient.shape) == (other.dtype, other.shape)
        assert gradient.isfinite().all()


def test_inference_mode(place):
    network, x = model(place), streams(place)
    with torch.inference_mode():
        assert torch.equal(network(x), network(x.detach()))
    assert torch.equal(network(x), network(x.detach()))


def test_export(place):
    network, x = model(place).requires_grad_(False), streams(place).detach()
    program = torch.export.export(network, (x,))
    assert_close([program.module()(x)], [network(x)])


@pytest.mark.gpu
def test_cuda_graph():
    place = ("triton", "cuda")
    network = model(place)
    expected = step(network, streams(place))
    # A leaf that took part in a graph on another stream would tie its gradient to that stream, which capture refuses.
    x = streams(place)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(network), (x,))
    assert all(torch.equal(a, b) for a, b in zip(step(graphed, x), expected, strict=True))


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
def test_opcheck_of_the_maps_alone(gamma, kernel_device):
    tensors = cases.Case(cases.MHC_PRE, (6,), N, D, torch.float32, gamma=gamma).inputs(kernel_device)
    leaves = [t if t is None else t.requires_grad_() for t in (tensors.get(name) for name in cases.MHC_PRE.inputs)]
    opcheck(contracts.mhc_maps_fwd.traced, (*leaves, *OPTIONS, "triton"))
    detached = [t if t is None else t.detach() for t in leaves]
    h_pre, h_post, h_res, inv_rms, h_mix = contracts.mhc_maps_fwd.traced(*detached, *OPTIONS, "triton")
    kept = (inv_rms, h_mix, h_pre, h_post, h_res)
    opcheck(contracts.mhc_maps_bwd.traced, (*detached, *OPTIONS, *kept, "triton"))
    opcheck(contracts.mhc_read_fwd.traced, (leaves[0], h_pre.requires_grad_(), "triton"))
    opcheck(contracts.mhc_read_bwd.traced, (detached[0], h_pre.detach(), detached[0][:, 0].clone(), "triton"))
    opcheck(contracts.mhc_mean_fwd.traced, (leaves[0], N, "triton"))
    opcheck(contracts.mhc_mean_bwd.traced, (N, detached[0][:, 0].clone(), "triton"))


def sharded(backend):
    """On each process of test_fsdp2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    place = (backend, "cpu")
    network, mesh = model(place), torch.distributed.init_device_mesh("cpu", (2,))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    x = streams(place)
    network(x).square().sum().backward()  # the same x everywhere, so the mean over processes is the gradient
    whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in network.parameters()]
    return [x.grad, *whole]


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.interpreted, id="interpreted")]
)
def test_fsdp2(backend):
    """Two processes, parameters sharded over them."""
    gradients, _ = processes.run(2, sharded, backend)
    network, x = model((backend, "cpu")), streams((backend, "cpu"))
    network(x).square().sum().backward()
    for gradient, expected in zip(gradients, [x.grad, *(p.grad for p in network.parameters())]):
        assert accuracy.close(gradient, expected.double())


def test_a_layer_that_returns_more(place):
    """(h_out, *rest) becomes (x_next, *rest), and extras reach the layer."""
    backend, device = place

    def layer(h, scale, *, shift):
        return h * scale + shift, "cache"

    wrapped = trained_maps(HyperConnection(layer, N, D, backend=backend)).to(device)
    x = streams(place)
    x_next, rest = wrapped(x, 2.0, shift=1.0)
    assert rest == "cache"
    alone = HyperConnection(lambda h: h * 2.0 + 1.0, N, D, backend=backend).to(device)
    alone.load_state_dict(wrapped.state_dict())
    assert torch.equal(x_next, alone(x))
    saving = HyperConnection(layer, N, D, backend=backend, checkpoint=True).to(device)
    saving.load_state_dict(wrapped.state_dict())
    assert torch.equal(saving(x, 2.0, shift=1.0)[0], x_next)


def test_wrong_layer_output():
    with pytest.raises(ValueError, match=r"^mhc_layer: h_out must be \[2, 4, 20\], got \[2, 4, 3, 20\]$"):
        HyperConnection(lambda h: h[..., None, :].expand(2, 4, N, D), N, D)(streams(("reference", "cpu")))
    with pytest.raises(TypeError, match=r"^mhc_layer: h_out must be a torch.Tensor, got NoneType$"):
        HyperConnection(lambda h: None, N, D)(streams(("reference", "cpu")))


def test_mhc_layer_is_the_module(place):
    backend, device = place
    module = trained_maps(HyperConnection(MLP(), N, D, gamma=True, backend=backend)).to(device)
    x = streams(place)
    expected = mhc_ops.mhc_layer(x, module.layer, module.phi, module.alpha, module.bias, module.gamma, backend=backend)
    assert torch.equal(module(x), expected)
