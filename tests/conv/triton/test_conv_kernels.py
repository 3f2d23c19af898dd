"""The Triton kernels of the convolution: against fp64, bit for bit against themselves, and at the edges."""

from functools import partial
from itertools import product

import pytest
import torch
from conv_oracle import assert_accurate

import mhc_ops
from mhc_ops.conv import ops
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


@pytest.mark.parametrize("case", CHECK, ids=str)
def test_accuracy(case, kernel_device, poisoned):
    assert_accurate(case, "triton", kernel_device)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", PARTS[::5], ids=str)
def test_any_of_the_outputs_may_be_unused(case, poisoned):
    assert_accurate(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*LARGE, *PARTS), ids=str)
def test_accuracy_of_large_sizes(case, poisoned):
    assert_accurate(case, "triton", "cuda")


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


OPS = [ConvCase(1, 6, 8, places=places, dtype=fp32) for places in ("", *PLACES)]
OPS += [ConvCase(1, 6, 8, n=2, dtype=fp32), ConvCase(2, 1, 8, update=True, dtype=fp32)]


@pytest.mark.parametrize("case", OPS, ids=str)
def test_opcheck(case, kernel_device, monkeypatch):
    requests, tensors = [], case.inputs(kernel_device)
    monkeypatch.setattr(ops, "run", lambda prepare, x, **given: [requests.append(prepare(x=x, **given)), x][1])
    for tensor in tensors.values() if case.subject.differentiable else ():
        tensor.requires_grad_(tensor.is_floating_point())
    case.subject.call(**tensors, backend="triton")
    (request,) = requests
    arguments = (*request.op.flattened(request.op.laid_out(request.inputs)), "triton")
    torch.library.opcheck(request.op.traced, arguments)


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
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
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
    assert_one_plan(kept.call.replayed)
    if case.update:
        return
    cotangents = accuracy.random_cotangents(case.subject, first)
    call.forget()
    first, second = (accuracy.run(case.subject, tensors, "triton", cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    (kept,) = call.kept_calls()
    assert_one_plan(kept.call.forward_keeping)
    ((_, backward),) = (pair for alike in kept.call.alike.values() for pair in alike)
    assert_one_plan(backward)


def assert_one_plan(replay):
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
