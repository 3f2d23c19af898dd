"""HyperStack: connections that hand a carry from one to the next."""

import copy
import gc
from functools import cache

import processes
import pytest
import torch
from mhc_kernels import bf16, fp16, fp32
from stack_results import PLACES, assert_close, assert_equal, gradients, random_cotangents
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.testing import accuracy

N, D, DEPTH = 3, 20, 3


@pytest.fixture(params=PLACES)
def place(request):
    if request.param[0] == "triton":
        pytest.importorskip("triton")
    return request.param


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def connections(place, depth=DEPTH, layer=MLP, **options):
    """The same each time, and away from the fresh state, so that every gradient is alive; every other one with a norm
    and gamma. Two iterations of Sinkhorn: the interpreter takes its time, and a stack does not know of them."""
    backend, device = place
    torch.manual_seed(0)
    made = [
        HyperConnection(
            layer(), N, D, gamma=i % 2 == 0, layer_norm=i % 2 == 0, sinkhorn_iters=2, backend=backend, **options
        )
        for i in range(depth)
    ]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for connection in made:
            phi = connection.phi
            phi.copy_(torch.randn(phi.shape, generator=generator) / phi.shape[1] ** 0.5)
            connection.alpha.fill_(1.0)
    return [connection.to(device) for connection in made]


def streams(place, dtype=fp32, outer=(2, 4)):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*outer, N, D, generator=generator).to(place[1], dtype).requires_grad_()


def step(network, x, *extras):
    """Output, gradient of x, gradients of the parameters."""
    out = network(x, *extras)
    return gradients(out, [x, *(p for p in network.parameters() if p.requires_grad)])


def connections_of(place, depth, dtype):
    """With layers of this type."""
    made = connections(place, depth)
    for connection in made:
        connection.layer.to(dtype)
    return made


@cache
def sequential_step(place, depth=DEPTH, dtype=fp32):
    """What every stack of these connections is to give."""
    return step(nn.Sequential(*connections_of(place, depth, dtype)), streams(place, dtype))


@pytest.mark.parametrize(
    ("recompute", "dtype"), [(0, bf16), (0, fp32), (1, bf16), (2, fp32), (3, bf16), (7, fp32)], ids=str
)
def test_is_the_sequential(recompute, dtype, place, poisoned):
    """Bit for bit the same values and gradients, whatever is made again in the backward."""
    stack, x = HyperStack(*connections_of(place, 4, dtype), recompute=recompute), streams(place, dtype)
    expected = sequential_step(place, 4, dtype)
    assert_equal(step(stack, x), expected)
    with torch.no_grad():
        assert torch.equal(stack(x), expected[0])


def test_keys_of_the_sequential():
    made = connections(("reference", "cpu"))
    assert list(HyperStack(*made).state_dict()) == list(nn.Sequential(*made).state_dict())


def kept(stack, x):
    """Which x of the stack are still in memory after a forward whose backward is to come."""
    found = []
    hooks = [
        connection.register_forward_hook(
            lambda module, inputs, carry: found.append(StorageWeakRef(carry.x.untyped_storage()))
        )
        for connection in stack
    ]
    _held = stack(x)
    for hook in hooks:
        hook.remove()
    gc.collect()  # the interpreter holds what it launched last
    return [number for number, storage in enumerate(found) if not storage.expired()]


def test_recompute_keeps_every_kth_x(kernel_device):
    pytest.importorskip("triton")
    place = ("triton", kernel_device)
    made, x = connections(place, 5), streams(place)
    for recompute, expected in ((0, range(5)), (1, range(5)), (2, (0, 2, 4)), (3, (0, 3)), (10, (0,))):
        assert kept(HyperStack(*made, recompute=recompute), x) == list(expected)


def test_recompute_does_not_run_layers_again(place):
    calls = []

    def layer():
        def counted(h_in):
            calls.append(1)
            return torch.tanh(h_in)

        return counted

    step(HyperStack(*connections(place, layer=layer), recompute=2), streams(place))
    assert len(calls) == DEPTH


def test_recompute_forgets_what_it_made(kernel_device):
    """Of each x when the backward has passed its boundary, not at the end, also of a graph that is kept; a second
    backward makes it again."""
    pytest.importorskip("triton")
    place = ("triton", kernel_device)
    alive, made = [], []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.view_as(h)

        @staticmethod
        def backward(ctx, dh):
            alive.append(sum(not storage.expired() for storage in made))
            return dh

    post = mhc_ops.mhc.recompute.mhc_post

    def watched_post(*arguments, **options):
        x = post(*arguments, **options)
        made.append(StorageWeakRef(x.untyped_storage()))
        return x

    stack = HyperStack(*connections(place, 7, lambda: Watched.apply), recompute=3)
    out = stack(x := streams(place)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mhc_ops.mhc.recompute, "mhc_post", watched_post)
        once, again = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    assert len(made) == 2 * 4, "x 1, 2, 4 and 5, each once"
    assert max(alive) <= 2
    assert not any(not storage.expired() for storage in made)


def test_nothing_is_held_behind_the_backward():
    """No cycle of Python objects: a GPU's memory would be full before they are looked for."""
    place = ("reference", "cpu")
    stack, found = HyperStack(*connections(place, 4), recompute=3), []
    for connection in stack:
        connection.register_forward_hook(
            lambda module, inputs, carry: found.extend(
                StorageWeakRef(tensor.untyped_storage()) for tensor in (carry.h_post, carry.h_res, carry.h_out)
            )
        )
    gc.collect()
    gc.disable()
    try:
        stack(streams(place)).sum().backward()
        assert [number for number, storage in enumerate(found) if not storage.expired()] == []
    finally:
        gc.enable()


def test_hooks_see_the_carry(place):
    made, x = connections(place), streams(place)
    seen = {"before": [], "after": [], "backward": []}
    for connection in made:
        connection.register_forward_pre_hook(lambda module, inputs: seen["before"].append(inputs[0].x))
        connection.register_forward_hook(lambda module, inputs, carry: seen["after"].append(carry.x))
    stack = HyperStack(*made)
    results = step(stack, x)
    between = [x]
    for connection in copy.deepcopy(made)[:2]:
        connection._forward_hooks.clear()
        connection._forward_pre_hooks.clear()
        between.append(connection(between[-1]))
    assert_equal(seen["after"], between)
    assert_equal(seen["before"], [x, x, between[1]])
    stack[1].register_full_backward_hook(lambda module, dinputs, doutputs: seen["backward"].append(doutputs))
    assert_equal(step(stack, x), results)
    assert len(seen["backward"]) == 1


def test_a_loss_on_x_between(place):
    """What a hook makes of carry.x has its gradient. Connection 2 gets the x that connection 1 read, and its h_out."""

    def with_loss(network, number):
        losses = []

        def look(module, inputs):
            losses.append(getattr(inputs[0], "x", inputs[0]).square().sum())

        handle = network[number].register_forward_pre_hook(look)
        out = network(x)
        handle.remove()
        return torch.autograd.grad(out.sum() + losses[0], [x, *network[0].parameters()])

    made, x = connections(place), streams(place)
    assert_close(with_loss(HyperStack(*made), 2), with_loss(nn.Sequential(*made), 1))


def test_recompute_and_a_hook_that_replaces_x(place):
    """The x of the hook is kept, as nothing says how to make it again."""

    def gradients_with(recompute):
        stack, x = HyperStack(*connections(place, 4), recompute=recompute), streams(place)
        stack[1].register_forward_hook(lambda module, inputs, carry: carry._replace(x=carry.x * 2, link=None))
        return step(stack, x)

    assert_equal(gradients_with(3), gradients_with(0))


@pytest.mark.parametrize("recompute", [0, 1, 3])
@pytest.mark.parametrize("number", [0, 1])
def test_changes_in_place_are_seen(number, recompute, place):
    outputs = []

    class Kept(MLP):
        def forward(self, x):
            outputs.append(super().forward(x))
            return outputs[-1]

    stack, x = HyperStack(*connections(place, layer=Kept), recompute=recompute), streams(place)
    out = stack(x)
    with torch.no_grad():
        outputs[number].mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed in place behind the forward"):
        out.sum().backward()


def test_recompute_where_hooks_are_not_allowed(place):
    stack, x = HyperStack(*connections(place), recompute=2), streams(place)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        results = step(stack, x)
    assert_equal(results, step(stack, x))


def test_a_hook_that_returns_something_else():
    stack = HyperStack(*connections(("reference", "cpu"), 2))
    stack[1].register_forward_hook(lambda module, inputs, carry: carry.x)
    with pytest.raises(
        TypeError, match=r"^HyperStack: connection 1 must return its carry, got Tensor \(of a hook\?\)$"
    ):
        stack(streams(("reference", "cpu")))


def test_rests_and_extras(place):
    backend, device = place

    def several(h, scale, *, shift):
        return h * scale + shift, "cache", 7

    def alone(h, scale, *, shift):
        return (h * scale,)

    def plain(h, scale, *, shift):
        return h * scale - shift

    made = [HyperConnection(layer, N, D, backend=backend).to(device) for layer in (several, alone, plain)]
    x = streams(place)
    out, rests = HyperStack(*made)(x, 2.0, shift=1.0)
    assert rests == [("cache", 7), (), ()]
    expected = made[2](made[1](made[0](x, 2.0, shift=1.0)[0], 2.0, shift=1.0)[0], 2.0, shift=1.0)
    assert torch.equal(out, expected)
    assert torch.equal(HyperStack(made[2])(x, 2.0, shift=1.0), made[2](x, 2.0, shift=1.0))


def is_of_some(name):
    return name.startswith(("0", "2"))


def is_of_a_layer(name):
    return "layer." in name


def is_of_maps(name):
    return not is_of_a_layer(name)


def test_frozen_parameters(place):
    """Of some connections, of all maps, of the layers alone; and x that needs no gradient."""
    made = connections(place)
    stack, sequential = HyperStack(*made), nn.Sequential(*made)
    for frozen, of_x in ((is_of_some, True), (is_of_some, False), (is_of_maps, False), (is_of_a_layer, True)):
        for name, parameter in stack.named_parameters():
            parameter.requires_grad_(not frozen(name))
        x = streams(place).requires_grad_(of_x)
        leaves = [leaf for leaf in (x, *stack.parameters()) if leaf.requires_grad]
        assert_equal(*(gradients(network(x), leaves) for network in (stack, sequential)))


def test_sizes_and_kinds_are_checked():
    one, other = HyperConnection(nn.Identity(), 4, 8), HyperConnection(nn.Identity(), 2, 8)
    with pytest.raises(ValueError, match=r"^HyperStack: connection 1 has n=2, D=8, but connection 0 has n=4, D=8$"):
        HyperStack(one, other)
    with pytest.raises(ValueError, match=r"^HyperStack: connection 1 has n=2, D=8, but connection 0 has n=4, D=8$"):
        HyperStack(one).append(other)
    with pytest.raises(TypeError, match=r"^HyperStack: connection 0 must be a HyperConnection, got Linear$"):
        HyperStack(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"^HyperStack: connection 0 must be a HyperConnection, got Linear$"):
        HyperStack(one).insert(0, nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"^HyperStack: connection 1 has n=2, D=8, but connection 0 has n=4, D=8$"):
        HyperStack(one, copy.deepcopy(one))[1] = other
    with pytest.raises(ValueError, match=r"^HyperStack: recompute must be 0 or more, got -1$"):
        HyperStack(one, recompute=-1)
    with pytest.raises(TypeError, match=r"^HyperStack: recompute must be an int, got bool$"):
        HyperStack(one, recompute=True)
    with pytest.raises(ValueError, match=r"^HyperConnection: x must be \[..., 4, 8\], got \[3, 2, 8\]$"):
        HyperStack(one, recompute=2)(torch.zeros(3, 2, 8))
    with pytest.raises(TypeError, match=r"^HyperConnection: x must be a torch.Tensor, got list$"):
        HyperStack(one)([1.0])
    with pytest.raises(TypeError, match=r"^mhc_leave: h_out must be a torch.Tensor, got NoneType$"):
        HyperStack(HyperConnection(lambda h: None, 2, 8))(torch.zeros(3, 2, 8))


def test_slices_and_repr():
    made = connections(("reference", "cpu"), 4)
    stack = HyperStack(*made, recompute=3)
    some = stack[1:3]
    assert isinstance(some, HyperStack)
    assert some.recompute == 3
    assert list(some) == made[1:3]
    assert stack[0] is made[0]
    assert len(stack) == 4
    assert "recompute=3" in repr(stack)
    for more in (stack + stack[:1], stack * 2, 2 * stack, HyperStack(*made[1:], recompute=3).insert(0, made[0])):
        assert isinstance(more, HyperStack)
        assert more.recompute == 3
        assert len(more) > 3
    x = streams(("reference", "cpu"))
    assert HyperStack()(x) is x
    assert torch.equal(copy.deepcopy(stack)(x), stack(x))


def test_norm_of_a_connection():
    connection = HyperConnection(nn.Identity(), 2, 8, layer_norm=True, dtype=fp16)
    assert connection.layer_norm_weight.dtype == fp16
    assert connection.layer_norm_weight.tolist() == [1.0] * 8
    assert set(connection.state_dict()) == {"phi", "alpha", "bias", "layer_norm_weight"}
    assert "layer_norm=True" in repr(connection)
    with torch.no_grad():
        connection.layer_norm_weight.zero_()
    connection.reset_parameters()
    assert connection.layer_norm_weight.tolist() == [1.0] * 8
    assert "layer_norm_weight" not in HyperConnection(nn.Identity(), 2, 8).state_dict()


def test_norm_of_a_connection_is_rms_norm(place):
    """As one that stands in front of the layer."""
    backend, device = place
    torch.manual_seed(0)
    inner, norm = nn.Linear(D, D), nn.RMSNorm(D, eps=1e-5)
    nn.init.normal_(norm.weight)
    fused = HyperConnection(inner, N, D, layer_norm=True, layer_norm_eps=1e-5, backend=backend).to(device)
    plain = HyperConnection(nn.Sequential(norm, inner), N, D, backend="reference").to(device)
    with torch.no_grad():
        for name in ("phi", "alpha", "bias"):
            getattr(plain, name).copy_(getattr(fused, name))
        fused.layer_norm_weight.copy_(norm.weight)
    x = streams(place)
    assert accuracy.close(fused(x), plain.double()(x.double()))


# What torch puts around a stack


@pytest.mark.parametrize(("compiler", "recompute"), [("aot_eager", 2), ("inductor", 0)])
def test_compile(compiler, recompute, place, cxx):
    """One graph, dynamic in the tokens; what recompute would leave out is kept."""
    torch.compiler.reset()
    stack, x = HyperStack(*connections(place, 2), recompute=recompute), streams(place)
    compiled = torch.compile(stack, fullgraph=True, dynamic=True, backend=compiler)
    assert_close(step(compiled, x), step(stack, x))
    longer = torch.cat([x.detach()] * 2).requires_grad_()
    assert_close(step(compiled, longer), step(stack, longer))


def test_export(place):
    stack, x = HyperStack(*connections(place), recompute=2).requires_grad_(False), streams(place).detach()
    assert_close([torch.export.export(stack, (x,)).module()(x)], [stack(x)])


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoint(reentrant, recompute, place):
    stack, x = HyperStack(*connections(place), recompute=recompute), streams(place)
    out = checkpoint(stack, x, use_reentrant=reentrant)
    out.backward(*random_cotangents([out]))
    assert_equal([x.grad, *(p.grad for p in stack.parameters())], sequential_step(place)[1:])


@pytest.mark.parametrize("recompute", [0, 2])
def test_checkpoint_option(recompute, place):
    saving = HyperStack(*connections(place, checkpoint=True), recompute=recompute)
    assert_equal(step(saving, streams(place)), sequential_step(place))


def test_autocast(place):
    """The layers run in bf16, the streams and maps stay fp32: the bits of the sequential."""
    made, x = connections(place), streams(place)
    networks = (nn.Sequential(*made), HyperStack(*made), HyperStack(*made, recompute=2))
    with torch.autocast(place[1], bf16):
        outputs = [network(x) for network in networks]
    assert [out.dtype for out in outputs] == [fp32] * 3
    leaves = [x, *(p for connection in made for p in connection.parameters())]
    expected, *results = (gradients(out, leaves) for out in outputs)
    for result in results:
        assert_equal(result, expected)


def test_inference_mode(place):
    stack, x = HyperStack(*connections(place), recompute=2), streams(place)
    with torch.inference_mode():
        result = stack(x.detach())
    assert torch.equal(result, stack(x))


@pytest.mark.gpu
def test_cuda_graph():
    place = ("triton", "cuda")
    stack = HyperStack(*connections(place), recompute=2)
    expected = step(stack, streams(place))
    x = streams(place)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(stack), (x,))
    assert_equal(step(graphed, x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"recompute": 2}, {"shifted": True}, {"shifted": True, "recompute": 2}], ids=str
)
def test_the_host_does_not_wait(settings):
    """A number copied to the GPU would be enough, and neither could such a step be captured."""
    place = ("triton", "cuda")
    stack, x = HyperStack(*connections(place), **settings), streams(place)
    stack(x).square().sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sharded(backend):
    """On each process of test_fsdp2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    place = (backend, "cpu")
    stack = HyperStack(*connections(place, 2), recompute=2)
    mesh, policy = torch.distributed.init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(cast_forward_inputs=False)
    for connection in stack:
        fully_shard(connection, mesh=mesh, mp_policy=policy)
    fully_shard(stack, mesh=mesh, mp_policy=policy)
    x = streams(place)
    with mhc_ops.metrics(stack) as health:
        stack(x).square().sum().backward()  # the same x everywhere, so the mean over processes is the gradient
    whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in stack.parameters()]
    return [x.grad, *whole], health.result()


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("triton", marks=pytest.mark.interpreted, id="interpreted")]
)
def test_fsdp2(backend):
    """Two processes, every connection sharded over them."""
    (found, numbers), _ = processes.run(2, sharded, backend)
    stack, x = HyperStack(*connections((backend, "cpu"), 2)), streams((backend, "cpu"))
    with mhc_ops.metrics(stack) as health:
        stack(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in stack.parameters())]
    assert_close(found, expected)
    assert numbers == pytest.approx(health.result(), rel=1e-5, abs=1e-6)
