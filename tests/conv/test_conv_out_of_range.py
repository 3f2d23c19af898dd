"""Boundaries, slots and lengths that no tensor has: nothing outside is read or written, the same in every backend."""

from functools import partial

import pytest
import torch

import mhc_ops
from mhc_ops.compat.causal_conv1d import causal_conv1d_varlen_states

NAN = float("nan")
L, D, W = 9, 20, 3
BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("triton", "cpu"), id="interpreted", marks=pytest.mark.interpreted),
    pytest.param(("triton", "cuda"), id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def where(request):
    """A backend and a device."""
    return request.param


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def among_nan(tensor, device, margin=7):
    """The tensor in the midst of NaN, and all of it: rows of the first dimension before and after."""
    whole = torch.full((2 * margin + len(tensor), *tensor.shape[1:]), NAN, device=device)
    whole[margin : margin + len(tensor)] = tensor
    return whole[margin : margin + len(tensor)], whole


# what is given, what it counts as
BOUNDARIES = [
    ([-3, 2, 99], [0, 2, 9]),
    ([0, 4, 10], [0, 4, 9]),
    ([-9, -2], [0, 0]),
    ([10, 20, 30], [9, 9, 9]),
    ([0, 6, 3, 9], [0, 6, 6, 9]),
    ([4, 1, 0], [4, 4, 4]),
    ([7, 2, 8, 5], [7, 7, 8, 8]),
    ([0, 100, -100, 5], [0, 9, 9, 9]),
    ([-(2**31), 3, 2**31 - 1, 4], [0, 3, 9, 9]),
    ([2**31 - 1], [9]),
]


def packed(where, boundaries, dtype, tensors, options):
    """Outputs and gradients; tokens and states lie amidst NaN."""
    backend, device = where
    x, states, residual = (among_nan(tensors[name], device)[0] for name in ("x", "initial_state", "residual"))
    leaves = [x[None], states, residual[None], tensors["weight"].to(device), tensors["bias"].to(device)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x, states, residual, weight, bias = leaves
    bounds = torch.tensor(boundaries, dtype=dtype, device=device)
    outputs = mhc_ops.causal_conv1d(
        x,
        weight,
        bias,
        residual=residual,
        initial_state=states,
        cu_seqlens=bounds,
        output_final_state=True,
        backend=backend,
        **options,
    )
    cotangents = [normal(*output.shape, seed=1).to(device) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("given", "meant"), BOUNDARIES, ids=[str(given) for given, _ in BOUNDARIES])
def test_boundaries(given, meant, dtype, where):
    """Boundaries count as within 0 and L and none as smaller than one before it; what is left of nothing is padding."""
    for options in ({"activation": "silu"}, {"dilation": 2}):
        S = (W - 1) * options.get("dilation", 1)
        tensors = {"x": normal(L, D), "initial_state": normal(len(given) - 1, D, S), "residual": normal(L, D, seed=2)}
        tensors |= {"weight": normal(D, W), "bias": normal(D)}
        results = packed(where, given, dtype, tensors, options)
        expected = packed(where, meant, dtype, tensors, options)
        assert all(map(torch.equal, results, expected))
        y, dx, dresidual = results[0][0], results[2][0], results[4][0]
        t = torch.arange(L)
        padding = (t < meant[0]) | (t >= meant[-1])
        assert not any(tensor[padding].any() for tensor in (y, dx, dresidual))
        plain = packed(("reference", "cpu"), meant, dtype, tensors, options)
        for one, other in zip(results, plain):
            torch.testing.assert_close(one.cpu(), other)


def test_boundaries_past_64_bits_of_tokens(where):
    backend, device = where
    x, weight = normal(1, L, D).to(device), normal(D, W).to(device)
    run = partial(mhc_ops.causal_conv1d, x, weight, backend=backend)
    given = torch.tensor([-(2**63), 3, 2**40, 2**63 - 1], device=device)
    assert torch.equal(run(cu_seqlens=given), run(cu_seqlens=torch.tensor([0, 3, 9, 9], device=device)))


@pytest.mark.parametrize("count", [255, 256, 257, 1000])
def test_many_boundaries(count, where):
    """More than a kernel looks at at once, and more tokens; the order is broken here and there."""
    backend, device = where
    length = 1500
    x, weight = normal(1, length, 1).to(device), normal(1, 2).to(device)
    given = torch.randint(-50, length + 50, (count,), generator=torch.Generator().manual_seed(0)).sort().values
    given[::100] = given[::100].flip(0)
    meant = given.clamp(0, length).cummax(0).values
    run = partial(mhc_ops.causal_conv1d, x, weight, output_final_state=True, backend=backend)
    results, expected = (run(cu_seqlens=bounds.to(device)) for bounds in (given, meant))
    assert all(map(torch.equal, results, expected))
    reference = mhc_ops.causal_conv1d(x.cpu(), weight.cpu(), cu_seqlens=meant, backend="reference")
    torch.testing.assert_close(results[0].cpu(), reference)


def test_nothing_is_written_outside(where):
    """The launchers themselves, on outputs amidst NaN."""
    backend, device = where
    if backend == "reference":
        pytest.skip("torch allocates its outputs")
    from mhc_ops.conv import triton as launchers

    bounds = torch.tensor([4, -2, 100, 3, 50], device=device)
    x, weight, state = normal(1, L, D).to(device), normal(D, W).to(device), normal(4, W - 1, D).to(device)
    y, around_y = among_nan(torch.zeros(1, L, D), device)
    last, around_last = among_nan(torch.zeros(4, W - 1, D), device)
    launchers.causal_conv1d_fwd(x, weight, None, None, None, bounds, state, True, 1, True, y, last)
    dx, around_dx = among_nan(torch.zeros(1, L, D), device)
    dstate, around_dstate = among_nan(torch.zeros(4, W - 1, D), device)
    dweight, dbias = torch.empty_like(weight), weight.new_empty(0)
    launchers.causal_conv1d_bwd(
        x, weight, None, None, bounds, state, torch.ones_like(y), last.clone(), True, 1, dx, dweight, dbias, dstate
    )
    pairs = (y, around_y), (last, around_last), (dx, around_dx), (dstate, around_dstate)
    for inner, around in pairs:
        assert not inner.isnan().any()
        assert around.isnan().sum() == around.numel() - inner.numel()


# which slots, which lengths, which of the sequences take part
UPDATES = [
    ([6, 1, -2, 3], None, [1, 3]),
    ([4, -1, 2, -5], None, [2]),
    ([2**31 - 1, -(2**31), 0, 1], None, [2, 3]),
    (None, [3, -1, 0, -(2**31)], [0, 2]),
    ([5, 1, 0, 2], [-1, -7, 8, 2], [2, 3]),
    ([-2, 4, 9, -9], [1, 2, 3, 4], []),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("T", [None, 1, 6])
@pytest.mark.parametrize(("slots", "lengths", "real"), UPDATES, ids=str)
def test_update(slots, lengths, real, T, dtype, where):
    """A slot that is not there and a negative length are padding: y is zero, and no state is touched."""
    backend, device = where
    x, weight = normal(*((4, D) if T is None else (4, T, D))).to(device), normal(D, W).to(device)
    before = normal(4, D, 4)
    state, around = among_nan(before, device)

    def index(values):
        return None if values is None else torch.tensor(values, dtype=dtype, device=device)

    update = partial(mhc_ops.causal_conv1d_update, weight=weight, activation="silu", backend=backend)
    y = update(x, state, cache_seqlens=index(lengths), conv_state_indices=index(slots))
    others = [b for b in range(4) if b not in real]
    assert not y[others].any()
    expected = before.to(device)
    used = real if slots is None else [slots[b] for b in real]
    alone = expected[used]
    of_real = None if lengths is None else index([lengths[b] for b in real])
    assert torch.equal(y[real], update(x[real], alone, cache_seqlens=of_real))
    expected[used] = alone
    assert torch.equal(state, expected)
    assert around.isnan().sum() == around.numel() - state.numel()


def test_update_of_lengths_past_32_bits(where):
    """A ring that has seen many tokens: only the length modulo its own matters."""
    backend, device = where
    x, weight, state = normal(3, D).to(device), normal(D, W).to(device), normal(3, D, 4).to(device)
    other = state.clone()
    update = partial(mhc_ops.causal_conv1d_update, x, weight=weight, backend=backend)
    y = update(conv_state=state, cache_seqlens=torch.tensor([2**63 - 1, 2**40 + 2, 5], device=device))
    assert torch.equal(y, update(conv_state=other, cache_seqlens=torch.tensor([3, 2, 1], device=device)))
    assert torch.equal(state, other)


def test_update_without_slots_has_no_padding(where):
    """pad_slot_id is about conv_state_indices alone."""
    backend, device = where
    x, weight, state = normal(3, D).to(device), normal(D, W).to(device), normal(3, D, 4).to(device)
    update = partial(mhc_ops.causal_conv1d_update, x, weight=weight, backend=backend)
    assert torch.equal(update(conv_state=state.clone(), pad_slot_id=1), update(conv_state=state.clone()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("given", "meant"), BOUNDARIES, ids=[str(given) for given, _ in BOUNDARIES])
def test_varlen_states(given, meant, dtype):
    x, _ = among_nan(normal(L, D), "cpu")
    states = [causal_conv1d_varlen_states(x, torch.tensor(bounds, dtype=dtype), 4) for bounds in (given, meant)]
    assert torch.equal(*states)
    assert not states[0].isnan().any()
