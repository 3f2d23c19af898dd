"""What servers call: prefill and decoding on a cache, against loops over tokens, in any layout, amidst NaN."""

import pytest
import torch
from server import Server
from serving_oracle import Draw, prefill, step

import mhc_ops
from mhc_ops.testing import accuracy
from mhc_ops.testing.cases import SEED
from mhc_ops.testing.fuzz import differ

NAN = float("nan")
DRAWS = [*range(8), *(pytest.param(number, marks=pytest.mark.thorough) for number in range(8, 80))]
STEPS = [(0, 12), *(pytest.param(number, 100, marks=pytest.mark.thorough) for number in range(1, 6))]


def whole(tensor):
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def there(tensor, device="cpu"):
    """A copy with the same strides, and of what lies around it."""
    copy = whole(tensor).to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(call, device):
    return {name: there(value, device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def assert_written(tensor, before, values):
    """The storage is the one of `before` in which these values were written to the tensor, and nothing else."""
    expected = there(before)
    expected.copy_(values)
    assert not differ(whole(tensor).cpu(), whole(expected))


def assert_filtered(y, taps, call, backend):
    """Each token is one rounding from fp64, and has the bits of `causal_conv1d` on its window alone. Padding is 0."""
    rows = y.reshape(-1, y.shape[-1])
    assert not rows[[row for row in range(len(rows)) if row not in taps]].any()
    if not taps:
        return
    filters = {name: call[name] for name in ("weight", "bias", "activation") if name in call}
    windows, found = torch.stack(list(taps.values())), rows[list(taps)]
    terms = filters["weight"].double() * windows.double()
    if "bias" in call:
        terms = torch.cat([terms, filters["bias"].double().expand_as(terms[..., 0])[..., None]], -1)
    z, sizes = terms.sum(-1), terms.norm(dim=-1)
    value = torch.nn.functional.silu(z) if filters["activation"] else z
    assert accuracy.close(found.cpu(), accuracy.Exact(value, (lambda: sizes,)))
    alone = mhc_ops.causal_conv1d(windows.mT.to(y.device), **moved(filters, y.device), backend=backend)
    assert torch.equal(found, alone[:, -1])


def padding(x, taps):
    return torch.tensor([row not in taps for row in range(x[..., 0].numel())], dtype=bool).view(*x.shape[:-1], 1)


@pytest.mark.parametrize("number", DRAWS)
def test_prefill(number, where, poisoned):
    """With NaN in what no sequence has."""
    backend, device = where
    call = Draw(SEED + number).prefill()
    taps, after = prefill(**call)
    call["x"].masked_fill_(padding(call["x"], taps), NAN)
    given = moved(call, device)
    y = mhc_ops.causal_conv1d_prefill(**given, backend=backend)
    assert y.is_contiguous()
    assert_filtered(y, taps, call, backend)
    assert_written(given["conv_state"], call["conv_state"], after)


@pytest.mark.interpreted
@pytest.mark.parametrize("number", DRAWS)
def test_prefill_in_another_order_of_programs(number, monkeypatch):
    """The last program first: no program writes a state that another still reads."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: in_order(builder.grid_dim[0] - 1 - x, y, z))
    test_prefill(number, ("triton", "cpu"), None)


@pytest.mark.parametrize("number", DRAWS)
def test_step(number, where, poisoned):
    """y is a new tensor, twice from other memory, a given one, or x. What no sequence has is NaN, and stays in x."""
    backend, device = where
    call = Draw(SEED + number).step()
    taps, after, windows = step(**call)
    nothing = padding(call["x"], taps)
    call["x"].masked_fill_(nothing, NAN)
    for target in ["new", "new", "out"] + ["x"] * ("parents" not in call):
        given = moved(call, device)
        out = {"new": None, "out": torch.full_like(given["x"], NAN), "x": given["x"]}[target]
        y = mhc_ops.causal_conv1d_update(**given, out=out, backend=backend)
        assert out is None or y is out
        in_place = target == "x"
        assert_written(given["x"], call["x"], y.cpu().masked_fill(nothing, NAN) if in_place else call["x"])
        assert_filtered(y.masked_fill(nothing.to(device), 0) if in_place else y, taps, call, backend)
        assert_written(given["conv_state"], call["conv_state"], after)
        if windows is not None:
            assert_written(given["windows"], call["windows"], windows)


def test_columns_of_one_slot(where, poisoned):
    """Without write_columns a step writes column 0. A final state stays where a state within the chunk has its slot."""
    backend, device = where
    generator = torch.Generator().manual_seed(SEED)
    x, cache, weight = (torch.randn(shape, generator=generator) for shape in ((7, 16), (8, 16, 3), (16, 4)))
    shared = {"conv_state": cache, "weight": weight, "bias": None}
    columns = {"conv_state_indices": torch.tensor([[1, 2, 3]]), "read_columns": torch.tensor([1])}
    blocks = {"first_columns": torch.tensor([0]), "tokens_before": torch.tensor([0]), "block_size": 4}
    bounds = torch.tensor([0, 7])
    for function, oracle, call in (
        (mhc_ops.causal_conv1d_update, step, {"x": x[:1], **shared, **columns}),
        (mhc_ops.causal_conv1d_prefill, prefill, {"x": x, **shared, **columns, **blocks, "cu_seqlens": bounds}),
    ):
        after = oracle(**call)[1]
        given = moved(call, device)
        function(**given, backend=backend)
        assert not differ(given["conv_state"].cpu(), after)


@pytest.mark.parametrize("form", ["prefill", "step", "drafts"])
@pytest.mark.thorough
def test_places_that_are_far_apart(form, where):
    """Offsets of more than 31 bits: 4 GB of memory that is not touched in between."""
    backend, device = where
    far, generator = 2**30 + 16, torch.Generator().manual_seed(SEED)
    drawn = (torch.randn(shape, generator=generator) for shape in ((4, 16), (4, 16, 3), (16, 4)))
    x, cache, weight = (tensor.to(device, torch.bfloat16) for tensor in drawn)
    distant = torch.empty(2 * far + 64, dtype=torch.bfloat16, device=device).as_strided((4, 16, 3), (16, 1, far))
    distant.copy_(cache)
    slots, accepted = torch.tensor([2, 1], device=device), torch.tensor([1, 1], device=device)
    for state in (cache, distant):
        given = {"conv_state": state, "weight": weight, "conv_state_indices": slots, "backend": backend}
        if form == "prefill":
            goes_on, bounds = accepted.bool(), torch.tensor([0, 1, 4], device=device)
            y = mhc_ops.causal_conv1d_prefill(x, **given, cu_seqlens=bounds, has_initial_state=goes_on)
        else:
            own = {"num_accepted_tokens": accepted} if form == "drafts" else {"out": torch.empty_like(x[:2])}
            y = mhc_ops.causal_conv1d_update(x[:2], **given, **own)
        if state is cache:
            expected = y
    assert torch.equal(y, expected) and torch.equal(distant, cache)


@pytest.mark.parametrize(("number", "steps"), STEPS)
def test_a_server_of_random_steps(number, steps, where):
    """Outputs and states are those of each sequence alone, bit for bit, and no other slot changes."""
    server = Server(SEED + number, *where)
    server.run(steps)
    assert server.compared > 2 * steps
