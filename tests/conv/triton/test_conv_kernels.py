"""The Triton kernels of the convolution: against fp64, bit for bit against themselves, and at the edges."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

import mhc_ops
from mhc_ops.core import call
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import CHECK, FINAL, PLACES, ConvCase

pytest.importorskip("triton")
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
conv = partial(mhc_ops.causal_conv1d, backend="triton")

# Sizes that fill more than one program in every direction: every kind of kernel, aligned and not
LARGE = (
    *(ConvCase(3, 1000, D, W) for D in (512, 1280, 4097) for W in (2, 4, 8)),
    *(ConvCase(3, 1000, 4096, dtype=dtype, silu=silu) for dtype in (bf16, fp16, fp32) for silu in (False, True)),
    *(ConvCase(1, 1500, D, places=places, residual=True) for D in (1024, 257) for places in PLACES),
    *(ConvCase(1, 1500, 512, 8, dtype, places=places) for dtype in (bf16, fp32) for places in PLACES),
    *(ConvCase(2, 1000, 1024, 4, dtype, dilation=3) for dtype in (bf16, fp32)),
    *(ConvCase(2, 700, D, W, dtype, n=4, residual=True) for D in (1280, 257) for W in (4, 8) for dtype in (bf16, fp32)),
    *(ConvCase(64, L, 4096, W, places=p, update=True) for L in (1, 3) for W in (2, 8) for p in ("", "ring", "slots")),
)


# Each output without a cotangent; `mhc-ops check` uses both. On a GPU an item size, a width and
# channels that are a multiple of 16 or not take other configs; the interpreter has one.
PARTS = [
    ConvCase(1, 9, D, W, dtype, dilation=1 + W // 7, places=places, unused=(unused,))
    for places, W, dtype, D, unused in product(FINAL, (1, 4, 7), (bf16, fp32), (20, 64), ("y", "final_state"))
]
SOME_PARTS = [
    case
    for case in PARTS
    if case.D == 20 and (case.dtype == bf16) == (case.unused == (("final_state" if "cu" in case.places else "y"),))
]


def assert_accurate(case, device):
    rows = accuracy.measure(case, "triton", device)
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("case", CHECK, ids=str)
def test_accuracy(case, kernel_device, poisoned):
    assert_accurate(case, kernel_device)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CHECK, ids=str)
def test_accuracy_at_any_seed(case, seed):
    """Of fewer tokens: the interpreter takes its time."""
    fewer = {} if case.update else {"B": 1, "L": min(20, case.L)}
    assert_accurate(replace(case, **fewer, seed=case.seed + seed), "cpu")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", SOME_PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused(case, poisoned):
    assert_accurate(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*LARGE, *PARTS), ids=str)
def test_accuracy_of_large_sizes(case, poisoned):
    assert_accurate(case, "cuda")


@pytest.mark.parametrize("dilation", [1, 3])
def test_pieces_have_the_bits_of_the_whole(dilation, kernel_device):
    tensors = ConvCase(2, 37, 20, dilation=dilation, places="states").inputs(kernel_device)
    x, state = tensors.pop("x"), tensors.pop("initial_state")
    run = partial(conv, **tensors, activation="silu", dilation=dilation, output_final_state=True)
    whole, last = run(x, initial_state=state)
    pieces = []
    for piece in x.split([1, 17, 2, 16, 1], 1):
        y, state = run(piece, initial_state=state)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, last)


def test_packed_has_the_bits_of_its_sequences(kernel_device):
    tensors = ConvCase(1, 37, 20, places="cu_seqlens states").inputs(kernel_device)
    bounds, x, states = (tensors.pop(name) for name in ("cu_seqlens", "x", "initial_state"))
    run = partial(conv, **tensors, activation="silu", output_final_state=True)
    y, last = run(x, cu_seqlens=bounds, initial_state=states)
    for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        alone, state = run(x[:, begin:end], initial_state=states[i : i + 1])
        assert torch.equal(y[:, begin:end], alone)
        assert torch.equal(last[i], state[0])
    assert not y[:, bounds[-1] :].any()


def test_token_by_token_has_the_bits_of_the_whole(kernel_device):
    tensors = ConvCase(2, 9, 20).inputs(kernel_device)
    x = tensors.pop("x")
    whole = conv(x, **tensors, activation="silu")
    state = x.new_zeros(2, 20, 3)
    step = partial(mhc_ops.causal_conv1d_update, **tensors, activation="silu", backend="triton")
    assert torch.equal(torch.stack([step(x[:, t], state) for t in range(9)], 1), whole)


def test_a_sequence_is_the_same_in_any_batch(kernel_device):
    """On a GPU, also in a batch that takes other configs."""
    for size in (1, 7) if kernel_device == "cpu" else (1, 7, 300):
        tensors = ConvCase(size, 20, 64).inputs(kernel_device)
        alone = conv(tensors["x"][:1].clone(), tensors["weight"], tensors["bias"])
        assert torch.equal(conv(**tensors)[:1], alone)


def leaves_of(tensors):
    return {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


LARGEST = torch.finfo(fp32).max
EXTREMES = [-LARGEST, -1e30, -1e8, -1000.0, -100.0, -88.0, -0.0, 0.0, 20.0, 100.0, 1e4, 1e8, 1e30, LARGEST]


def slopes(z):
    """dsilu/dz in fp64"""
    leaf = z.double().requires_grad_()
    y = torch.nn.functional.silu(leaf)
    return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]


def test_silu_of_any_number(kernel_device):
    """y, dx and dinitial_state where z is as large as its type allows: 1 or 0 from both sides, never 0·inf."""
    close = partial(torch.testing.assert_close, atol=1e-36)
    for dtype in (bf16, fp32):
        z, eps = torch.tensor(EXTREMES, device=kernel_device).to(dtype), torch.finfo(dtype).eps
        z = torch.where(z.isinf(), z.sign() * torch.finfo(dtype).max, z)
        weight = torch.tensor([1.0, 0.0], device=kernel_device).expand(len(z), 2)
        state, x = z[None, :, None].clone().requires_grad_(), z.new_zeros(1, 2, len(z))
        x[0, 0] = z
        x.requires_grad_()
        y = conv(x, weight, activation="silu", initial_state=state)
        gradients = torch.autograd.grad(y, (x, state), torch.ones_like(y))
        for t in range(2):  # of the state, then of x
            close(y[0, t].double(), torch.nn.functional.silu(z.double()), rtol=2 * eps)
        for gradient in (gradients[0][0, 0], gradients[1][0, :, 0]):
            close(gradient.double(), slopes(z), rtol=4 * eps)
    # and in short_conv, on the last z, of fp32
    x, gamma = (torch.ones(1, 1, 1, len(z), device=kernel_device).requires_grad_() for _ in range(2))
    weight = z[:, None].clone().requires_grad_()
    y = mhc_ops.short_conv(x, gamma[0, 0], weight, residual=False, norm_eps=0.0, backend="triton")
    close(y.flatten().double(), torch.nn.functional.silu(z.double()), rtol=1e-6)
    (dweight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    close(dweight.flatten().double(), slopes(z), rtol=1e-6)


def test_packing(kernel_device):
    """More boundaries than a program looks at at once, more tokens than one has; some out of range or of order."""
    from mhc_ops.conv.triton.states import packing

    for dtype, count, L in product((torch.int32, torch.int64), (1, 2, 128, 129, 1000), (0, 1, 512, 1300)):
        given = torch.randint(-50, L + 50, (count,), generator=torch.Generator().manual_seed(count), dtype=dtype)
        given = given.sort().values
        given[::70] = given[::70].flip(0)
        bounds = given.clamp(0, L).cummax(0).values.int()
        ids = torch.searchsorted(bounds, torch.arange(L, dtype=torch.int32), right=True).int() - 1
        ids[ids == count - 1] = -1
        found_ids, found_bounds = packing(given.to(kernel_device), L)
        assert torch.equal(found_ids.cpu(), ids) and torch.equal(found_bounds.cpu(), bounds), (dtype, count, L)


def layouts(x):
    D = x.shape[-1]
    yield "channels last", x
    yield "of a wider tensor", torch.cat([x, x + 1], -1)[..., :D]
    yield "tokens last", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "every second token", torch.stack([x, x], 2)[:, :, 0]
    yield "batch inside", x.transpose(0, 1).contiguous().transpose(0, 1)


def test_layouts_of_x(kernel_device):
    tensors = ConvCase(2, 20, 24).inputs(kernel_device)
    x = tensors.pop("x")
    expected = conv(x, **tensors)
    for name, view in layouts(x):
        leaf = view.detach().requires_grad_()
        y = conv(leaf, **tensors)
        assert torch.equal(y, expected), name
        dy = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(0)).to(y).expand_as(y)
        (dx,) = torch.autograd.grad(y, leaf, dy)  # an expanded cotangent
        exact = mhc_ops.causal_conv1d(leaf.double(), **tensors, backend="reference")
        assert accuracy.close(dx, torch.autograd.grad(exact, leaf, dy.double())[0].double()), name


@pytest.mark.parametrize("places", ["", *PLACES])
def test_opcheck(places, kernel_device):
    from mhc_ops.conv import contracts

    case = ConvCase(1, 6, 8, places=places, dtype=fp32)
    tensors = case.inputs(kernel_device)
    if "initial_state" in tensors:
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous().mT  # channels side by side
    inputs = dict.fromkeys(contracts.causal_conv1d_fwd.inputs) | leaves_of(tensors)
    inputs |= {"silu": True, "dilation": 1, "output_final_state": places in FINAL}
    torch.library.opcheck(contracts.causal_conv1d_fwd.traced, (), {**inputs, "backend": "triton"})


def test_opcheck_of_the_others(kernel_device):
    from mhc_ops.conv import contracts

    streams = leaves_of(ConvCase(1, 6, 8, n=2, dtype=fp32).inputs(kernel_device))
    options = {"norm_eps": 1e-5, "dilation": 1, "residual": True, "backend": "triton"}
    torch.library.opcheck(contracts.short_conv_fwd.traced, (), {**streams, **options})
    tensors = ConvCase(2, 1, 8, update=True, dtype=fp32).inputs(kernel_device)
    options = {"cache_seqlens": None, "conv_state_indices": None, "silu": True, "dilation": 1, "pad_slot_id": -1}
    torch.library.opcheck(contracts.causal_conv1d_update_.traced, (), {**tensors, **options, "backend": "triton"})


def test_compiled(kernel_device, cxx):
    """torch.compile, whole graph, other lengths without another compilation of the graph's function."""
    tensors = ConvCase(1, 20, 24).inputs(kernel_device)
    x = tensors.pop("x")
    compiled = torch.compile(partial(conv, **tensors, activation="silu"), fullgraph=True, backend="aot_eager")
    for L in (20, 13, 7):
        assert torch.equal(compiled(x[:, :L]), conv(x[:, :L], **tensors, activation="silu"))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The last tokens of a tensor past 2^31 elements have the bits they have alone, forward and in dx."""
    L, D = 270_000, 8192
    needed = 8 * L * D * 2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free GPU memory")
    tail = ConvCase(1, 100, D).inputs("cuda")
    whole = {**tail, "x": tail["x"].new_zeros(1, L, D)}
    whole["x"][:, -100:] = tail["x"]
    assert whole["x"].numel() > 2**31

    def run(tensors):
        leaves = leaves_of(tensors)
        y = conv(**leaves, activation="silu")
        (dx,) = torch.autograd.grad(y, [leaves["x"]], torch.ones_like(y))
        return y[:, -100:].clone(), dx[:, -100:].clone()

    assert all(torch.equal(one, other) for one, other in zip(run(whole), run(tail)))


@pytest.mark.gpu
def test_decoding_in_a_cuda_graph():
    tensors = ConvCase(4, 1, 512, update=True).inputs("cuda")
    state = tensors.pop("conv_state")
    captured, eager = state.clone(), state.clone()
    step = partial(mhc_ops.causal_conv1d_update, **tensors, activation="silu")
    step(conv_state=captured)
    captured.copy_(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(conv_state=captured)
    captured.copy_(state)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, step(conv_state=eager))
    assert torch.equal(captured, eager)


REPLAYED = [
    *(ConvCase(2, 37, 65, silu=silu, bias=bias) for silu in (False, True) for bias in (False, True)),
    ConvCase(1, 20, 40, n=3, residual=True),
    *(ConvCase(3, L, 65, places=places, update=True) for L in (1, 2) for places in ("", "ring", "slots")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REPLAYED, ids=str)
def test_calls_are_replayed(case):
    """A second call that is like the first finds its plan, and gives the same bits; so does a second training step."""
    tensors = case.inputs("cuda")
    first, second = (accuracy.run(case.subject, tensors, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    (kept,) = call.kept_calls()
    assert_one_plan(kept.call.forward)
    if case.update:
        return
    cotangents = accuracy.random_cotangents(case.subject, first)
    call.forget()
    first, second = (accuracy.run(case.subject, tensors, "triton", cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    (kept,) = call.kept_calls()
    assert_one_plan(kept.call.forward_keeping)
    assert_one_plan(kept.call.backward)


def assert_one_plan(replay):
    """Both calls had the same one, and it can be replayed."""
    (plan,) = replay.plans.values()
    assert plan is not None


def test_vmap_of_a_step_is_refused(kernel_device):
    """Batched by hand, a step has a slot for each sequence."""
    case = ConvCase(3, 1, 8, dtype=fp32, update=True)
    tensors = case.inputs(kernel_device)
    x, state = tensors.pop("x"), tensors.pop("conv_state")
    step = partial(mhc_ops.causal_conv1d_update, **tensors, backend="triton")
    message = "^causal_conv1d_update_: vmap of an op that writes to its inputs works with backend='reference' only$"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.vmap(lambda x, state: step(x[None], state[None]))(x, state)
