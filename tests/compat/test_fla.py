"""The short convolution of flash-linear-attention: the functions of mhc_ops, and states of W inputs."""

import pytest
import torch
from stack_results import gradients

import mhc_ops
from mhc_ops.compat.fla import ShortConvolution, causal_conv1d, causal_conv1d_update

B, T, D, W = 2, 9, 5, 4
PACKED = (0, 6, 6, 8, 9)  # longer than W, empty, shorter than W, one token


def expected(*, x, weight, bias=None, residual=None, initial_state=None, **given):
    """y and the final states [N, D, W], by mhc_ops. Slot 0 gives no gradient to x or to slot 0 of initial states."""
    before = None if initial_state is None else initial_state[..., 1:]
    y = mhc_ops.causal_conv1d(x, weight, bias, residual=residual, initial_state=before, **given)
    bounds = given.get("cu_seqlens")
    parts = x.unbind() if bounds is None else x[0].split(bounds.diff().tolist())
    states = x.new_zeros(len(parts), D, W) if initial_state is None else unread(initial_state)
    states = [torch.cat([state, part.mT], -1)[:, -W:] for state, part in zip(states, parts)]
    return y, torch.stack([unread(state) if len(part) >= W else state for state, part in zip(states, parts)])


def unread(state):
    return torch.cat([state[..., :1].detach(), state[..., 1:]], -1)


def inputs(dtype=torch.float64, bounds=None, **sizes):
    generator = torch.Generator().manual_seed(0)
    rows, length = (1 if bounds else sizes.get("B", B)), sizes.get("T", T)
    shapes = {"x": (rows, length, D), "weight": (D, W), "bias": (D,), "residual": (rows, length, D)}
    shapes["initial_state"] = (len(bounds) - 1 if bounds else rows, D, W)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def assert_as_expected(function, tensors, bounds, activation):
    """Outputs and gradients. Returns the outputs, and what was given beside the tensors."""
    given = {"cu_seqlens": None if bounds is None else torch.tensor(bounds), "activation": activation}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    outputs = function(**leaves, **given, output_final_state=True), expected(**leaves, **given)
    found, exact = (gradients(each, list(leaves.values())) for each in outputs)
    assert torch.equal(found[1], exact[1]), "a state is a copy"
    torch.testing.assert_close(found, exact)
    return found[:2], given


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("left_out", [(), ("initial_state",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"T": 2}, {"bounds": PACKED}], ids=str)
def test_forward_and_backward(sizes, left_out, activation):
    tensors = {name: t for name, t in inputs(**sizes).items() if name not in left_out}
    (y, state), given = assert_as_expected(causal_conv1d, tensors, sizes.get("bounds"), activation)
    assert state.is_contiguous()
    alone, nothing = causal_conv1d(**tensors, **given)
    assert nothing is None and torch.equal(alone, y)


def test_in_kernels(each_backend):
    assert_as_expected(causal_conv1d, inputs(torch.float32, bounds=PACKED), PACKED, "silu")


@pytest.mark.parametrize("shape", [(3, D), (1, 3, D), (3, 1, D)], ids=str)
def test_update(shape, each_backend):
    tensors = inputs(torch.float32, B=3, T=1)
    wanted, state = expected(**tensors, activation="silu")
    x, residual = tensors.pop("x").reshape(shape), tensors.pop("residual").reshape(shape)
    cache = tensors.pop("initial_state")
    y, returned = causal_conv1d_update(x, cache, residual, activation="silu", **tensors)
    assert returned is cache and torch.equal(cache, state) and y.shape == shape
    torch.testing.assert_close(y, wanted.view(shape))


def test_types_of_states():
    """A cache in fp32 beside x in bf16, as mixed precision has it."""
    tensors = {name: t.bfloat16() for name, t in inputs(torch.float32, B=3, T=1).items() if name != "residual"}
    cache = tensors.pop("initial_state").float()
    y, last = causal_conv1d(**tensors, initial_state=cache, output_final_state=True)
    step, _ = causal_conv1d_update(tensors.pop("x"), cache, **tensors)
    assert y.dtype == last.dtype == step.dtype == torch.bfloat16
    assert torch.equal(step, y) and torch.equal(cache.bfloat16(), last)


def test_channels_in_heads_and_seq_idx():
    """seq_idx with or without a backend gives the result of cu_seqlens."""
    tensors = {name: t for name, t in inputs(B=1).items() if name != "initial_state"}
    ids, bounds = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32), {"cu_seqlens": torch.tensor([0, 4, 9])}
    whole, last = causal_conv1d(**tensors, **bounds, output_final_state=True)
    assert torch.equal(causal_conv1d(**tensors, backend="mix", seq_idx=ids)[0], whole)
    assert torch.equal(causal_conv1d(**tensors, **bounds, seq_idx=ids)[0], whole)
    wide = {**tensors, "x": tensors["x"].unflatten(-1, (D, 1))}
    y, state = causal_conv1d(**wide, **bounds, output_final_state=True)
    assert torch.equal(y, whole.unflatten(-1, (D, 1))) and torch.equal(state, last)


@pytest.fixture
def conv():
    torch.manual_seed(0)
    return ShortConvolution(D, W, bias=True, dtype=torch.float64)


def test_module_has_the_parameters_of_conv1d(conv):
    assert {name: tuple(p.shape) for name, p in conv.named_parameters()} == {"weight": (D, 1, W), "bias": (D,)}
    plain = torch.nn.Conv1d(D, D, W, padding=W - 1, groups=D, dtype=torch.float64)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(B, T, D, dtype=torch.float64)
    y, nothing = conv(x)
    assert nothing is None
    torch.testing.assert_close(y, torch.nn.functional.silu(plain(x.mT)[..., :T].mT))
    assert conv.state_size == D * W and "activation=silu" in repr(conv)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_prompt_and_then_token_by_token(conv, packed):
    """The whole at once has the same; a step is in place, and what is not a step leaves the cache alone."""
    x = torch.randn(B, T, D, dtype=torch.float64)
    whole, last = conv(x, residual=x, output_final_state=True)
    cache, pieces = None, []
    for piece in x.split([5, 1, 1, 2], 1):
        kept, places = None if cache is None else cache.clone(), {}
        if packed:
            places = {"cu_seqlens": torch.arange(B + 1) * piece.shape[1]}
            piece = piece.reshape(1, -1, D)
        with torch.no_grad():
            y, after = conv(piece, residual=piece, cache=cache, output_final_state=True, **places)
        if cache is not None:
            assert (after is cache) == (y.numel() == B * D)
            assert after is cache or torch.equal(cache, kept)
        cache = after
        pieces.append(y.view(B, -1, D))
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(cache, last)


def test_a_step_under_autograd_is_differentiated(conv):
    x, cache = torch.randn(B, 1, D, dtype=torch.float64), torch.randn(B, D, W, dtype=torch.float64)
    before = cache.clone()
    y, after = conv(x, cache=cache, output_final_state=True)
    assert y.requires_grad and after is not cache and torch.equal(cache, before)
    with torch.no_grad():
        torch.testing.assert_close(conv(x, cache=cache)[0], y)


def test_mask(conv):
    """A mask in fp32 does not change the type: it gives the bits of one of booleans, in a step too."""
    x, mask = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True), torch.ones(B, T)
    mask[1, :3] = 0
    y, _ = conv(x, mask=mask)
    torch.testing.assert_close(y[1:, 3:], conv(x[1:, 3:])[0])
    y.sum().backward()
    assert not x.grad[1, :3].any()
    conv = ShortConvolution(D, W, dtype=torch.bfloat16)
    for length in (1, T):
        x, mask = torch.randn(B, length, D).bfloat16(), torch.tensor([[True], [False]]).expand(B, length)
        with torch.no_grad():
            found, expected = (conv(x, mask=given, output_final_state=True) for given in (mask.float(), mask))
        assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2
        assert all(map(torch.equal, found, expected))


def test_errors(conv):
    x, weight = torch.zeros(B, T, D), torch.zeros(D, W)
    causal_conv1d(x, weight)
    states = x[:, :D, : W - 1]
    for name, value in {"weight": None, "backend": "other", "activation": "gelu", "initial_state": states}.items():
        with pytest.raises(ValueError, match=f"^causal_conv1d: {name} must be "):
            causal_conv1d(**{"x": x, "weight": weight, name: value})
    with pytest.raises(NotImplementedError, match=r"^causal_conv1d: there is no cp_context"):
        causal_conv1d(x, weight, cp_context=object())
    with pytest.raises(ValueError, match=r"^ShortConvolution: mask and cu_seqlens exclude each other"):
        conv(x[:1], mask=x[:1, :, 0], cu_seqlens=torch.tensor([0, T]))
    for name, value in {"activation": "relu", "backend": "mix"}.items():
        with pytest.raises(ValueError, match=f"^ShortConvolution: {name} must be "):
            ShortConvolution(D, W, **{name: value})
