"""What servers call: prefill and decoding on a cache, against loops over tokens, in any layout, amidst NaN."""

import pytest
import torch
from server import Server
from serving_oracle import Draw, prefill, step

import mhc_ops
from mhc_ops.testing import accuracy
from mhc_ops.testing.cases import SEED

DRAWS = [*range(8), *(pytest.param(number, marks=pytest.mark.thorough) for number in range(8, 80))]


def moved(call, device):
    """The tensors on a device, with their strides, and what lies around them."""

    def there(tensor):
        whole = torch.empty_strided(
            (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), dtype=tensor.dtype, device=device
        )
        whole.copy_(torch.as_strided(tensor, whole.shape, (1,), 0))
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: there(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def bits(tensor):
    """What tells NaN apart too."""
    whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(whole)


def around(tensor):
    """All that the storage of a tensor holds."""
    return bits(torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0))


def expected_around(tensor, after):
    """The storage after a call that writes these values to the tensor, and nothing else."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor, (size,), (1,), 0).clone()
    whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(after)
    return bits(whole)


def assert_close(y, expected, words):
    value, sizes = expected
    assert not y.cpu()[(sizes == 0).all(-1)].any(), words
    assert accuracy.close(y.cpu(), accuracy.Exact(value, (lambda: sizes,))), words


@pytest.mark.parametrize("number", DRAWS)
def test_prefill(number, where, poisoned):
    backend, device = where
    call = Draw(SEED + number).prefill()
    words = {name: value.tolist() if name.startswith(("cu", "conv_state_i")) else value for name, value in call.items()
             if name not in ("x", "conv_state", "weight", "bias")}  # fmt: skip
    y, after = prefill(**call)
    state = expected_around(call["conv_state"], after)
    given = moved(call, device)
    found = mhc_ops.causal_conv1d_prefill(**given, backend=backend)
    assert found.is_contiguous()
    assert_close(found, y, words)
    assert torch.equal(around(given["conv_state"]), state), words


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
    """Each call returns a tensor, writes to another, or in place of x."""
    backend, device = where
    call = Draw(SEED + number).step()
    y, after, windows, real = step(**call)
    state = expected_around(call["conv_state"], after)
    all_windows = None if windows is None else expected_around(call["windows"], windows)
    targets = ["new", "out"] + ["x"] * ("parents" not in call)
    for target in targets:
        given = moved(call, device)
        x, words = given["x"].clone(), (target, call.keys())
        before = around(given["x"])
        out = torch.full_like(x, float("nan"))
        out = {"new": {}, "out": {"out": out}, "x": {"out": given["x"]}}[target]
        found = mhc_ops.causal_conv1d_update(**given, **out, backend=backend)
        assert target == "new" or found is out["out"]
        if target == "x":
            rows = real.view(*x.shape[:-1], 1)
            assert torch.equal(bits(torch.where(rows, 0, found.cpu())), bits(torch.where(rows, 0, x.cpu()))), words
            assert torch.equal(around(found), expected_around(moved(call, "cpu")["x"], found.cpu())), words
            found = torch.where(rows, found.cpu(), 0)
        else:
            assert torch.equal(around(given["x"]), before)
        assert_close(found, y, words)
        assert torch.equal(around(given["conv_state"]), state), words
        if windows is not None:
            assert torch.equal(around(given["windows"]), all_windows), words


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
        assert torch.equal(bits(given["conv_state"]), bits(after))


@pytest.mark.parametrize("form", ["prefill", "step", "drafts"])
@pytest.mark.thorough
def test_places_that_are_far_apart(form, where):
    """Offsets of more than 31 bits: 4 GB of memory that is not touched in between."""
    backend, device = where
    far, generator = 2**30 + 16, torch.Generator().manual_seed(SEED)
    x, cache, weight = (
        torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in ((4, 16), (4, 16, 3), (16, 4))
    )
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


@pytest.mark.parametrize(
    ("number", "steps"), [(0, 12), *(pytest.param(number, 100, marks=pytest.mark.thorough) for number in range(1, 6))]
)
def test_a_server_of_random_steps(number, steps, where):
    """Outputs and states are those of each sequence alone, bit for bit, and no other slot changes."""
    done = Server(SEED + number, *where).run(steps)
    assert done["tokens compared"] > 2 * steps, done
