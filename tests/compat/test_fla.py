"""The short convolution of flash-linear-attention, against its equations: one token and one tap at a time, in fp64."""

import operator
import re
from itertools import pairwise

import pytest
import torch
from compat_oracle import signature

from mhc_ops.compat.fla import ShortConvolution, causal_conv1d, causal_conv1d_update
from mhc_ops.testing import accuracy

B, T, D, W = 2, 9, 5, 4
PACKED = (0, 6, 6, 8, 9)  # longer than W, empty, shorter than W, one token


def oracle(x, weight, bias=None, residual=None, initial_state=None, activation=None, bounds=None):
    """y and the final states [N, D, W]; no gradient flows through slot 0 of them to x, or into that of initial ones."""
    (B, T, D), W = x.shape, weight.shape[1]
    spans = [(b, 0, T) for b in range(B)] if bounds is None else [(0, *two) for two in pairwise(bounds)]
    rows, states = torch.zeros_like(x).unbind(0), []
    rows = [list(row.unbind(0)) for row in rows]
    for i, (b, begin, end) in enumerate(spans):
        state = x.new_zeros(D, W) if initial_state is None else unread(initial_state[i])
        for t in range(begin, end):
            state = torch.cat([state[:, 1:], x[b, t, :, None]], -1)
            z = (state * weight).sum(-1) + (0 if bias is None else bias)
            y = z * torch.sigmoid(z) if activation else z
            rows[b][t] = y if residual is None else y + residual[b, t]
        states.append(unread(state) if end - begin >= W else state)
    return torch.stack([torch.stack(row) for row in rows]), torch.stack(states)


def unread(state):
    """Without the gradient of slot 0."""
    return torch.cat([state[:, :1].detach(), state[:, 1:]], -1)


def inputs(dtype=torch.float64, bounds=None, **sizes):
    generator = torch.Generator().manual_seed(0)
    rows, length = (1 if bounds else sizes.get("B", B)), sizes.get("T", T)
    shapes = {"x": (rows, length, D), "weight": (D, W), "bias": (D,), "residual": (rows, length, D)}
    shapes["initial_state"] = (len(bounds) - 1 if bounds else rows, D, W)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def gradients(function, tensors, cotangents=None):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    outputs = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, list(leaves.values()), cotangents)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("left_out", [(), ("initial_state",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"T": 2}, {"bounds": PACKED}], ids=str)
def test_forward_and_backward(sizes, left_out, activation):
    tensors = {name: t for name, t in inputs(**sizes).items() if name not in left_out}
    bounds = sizes.get("bounds")
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    given = {"cu_seqlens": cu_seqlens, "activation": activation, "output_final_state": True}
    outputs, grads = gradients(lambda **t: causal_conv1d(**t, **given), tensors)
    expected, exact = gradients(lambda **t: oracle(**t, bounds=bounds, activation=activation), tensors)
    assert all(accuracy.close(one, other) for one, other in zip(outputs, expected))
    assert torch.equal(outputs[1], expected[1]), "a state is a copy"
    assert outputs[1].is_contiguous()
    assert all(accuracy.close(one, other) for one, other in zip(grads, exact))
    alone, nothing = causal_conv1d(**tensors, **{**given, "output_final_state": False})
    assert nothing is None
    assert torch.equal(alone, outputs[0])


def test_in_kernels(each_backend):
    tensors = inputs(torch.float32, bounds=PACKED)
    given = {"cu_seqlens": torch.tensor(PACKED), "activation": "silu", "output_final_state": True}
    outputs, grads = gradients(lambda **t: causal_conv1d(**t, **given), tensors)
    wide = {name: t.double() for name, t in tensors.items()}
    expected, exact = gradients(lambda **t: oracle(**t, bounds=PACKED, activation="silu"), wide)
    assert all(accuracy.close(one, other) for one, other in zip((*outputs, *grads), (*expected, *exact)))


@pytest.mark.parametrize("shape", [(3, D), (1, 3, D), (3, 1, D)], ids=str)
def test_update(shape, each_backend):
    tensors = inputs(torch.float32, B=3, T=1)
    tensors["cache"] = tensors.pop("initial_state")
    x, residual = tensors.pop("x").reshape(shape), tensors.pop("residual").reshape(shape)
    wide = {name: t.double() for name, t in tensors.items()}
    wide["initial_state"], wide["residual"] = wide.pop("cache"), residual.double().view(3, 1, D)
    expected, state = oracle(x.double().view(3, 1, D), activation="silu", **wide)
    cache = tensors["cache"]
    y, returned = causal_conv1d_update(x, residual=residual, activation="silu", **tensors)
    assert returned is cache
    assert torch.equal(cache.double(), state)
    assert y.shape == shape
    assert accuracy.close(y, expected.view(shape))


def test_types_of_states():
    """A cache in fp32 beside x in bf16, as mixed precision has it."""
    tensors = {name: t.bfloat16() for name, t in inputs(torch.float32, B=3, T=1).items() if name != "residual"}
    cache = tensors.pop("initial_state").float()
    y, last = causal_conv1d(**tensors, initial_state=cache, output_final_state=True)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.bfloat16)
    step, _ = causal_conv1d_update(tensors.pop("x"), cache, **tensors)
    assert step.dtype == torch.bfloat16
    assert torch.equal(step, y)
    assert torch.equal(cache.bfloat16(), last)


def test_channels_in_heads():
    tensors = inputs()
    wide = {**tensors, "x": tensors["x"].unflatten(-1, (D, 1))}
    y, state = causal_conv1d(**wide, output_final_state=True)
    expected, last = causal_conv1d(**tensors, output_final_state=True)
    assert torch.equal(y, expected.unflatten(-1, (D, 1)))
    assert torch.equal(state, last)


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
    assert conv.state_size == D * W
    assert "activation=silu" in repr(conv)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_prompt_and_then_token_by_token(conv, packed):
    """The whole at once has the same; a step is in place, and what is not a step leaves the cache alone."""
    x = torch.randn(B, T, D, dtype=torch.float64)
    whole, last = conv(x, residual=x, output_final_state=True)
    with torch.no_grad():
        cache, pieces = None, []
        for piece in x.split([5, 1, 1, 2], 1):
            kept = None if cache is None else cache.clone()
            places = {}
            if packed:
                length = piece.shape[1]
                piece, places = piece.reshape(1, -1, D), {"cu_seqlens": torch.arange(B + 1) * length}
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
    assert y.requires_grad and after is not cache
    assert torch.equal(cache, before)
    with torch.no_grad():
        step, _ = conv(x, cache=cache)
    torch.testing.assert_close(step, y)


def test_mask(conv):
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(B, T)
    mask[1, :3] = 0
    y, _ = conv(x, mask=mask)
    expected, _ = conv(x[1:, 3:])
    torch.testing.assert_close(y[1:, 3:], expected)
    y.sum().backward()
    assert not x.grad[1, :3].any()


@torch.no_grad()
def test_a_mask_does_not_change_the_type():
    """A mask in fp32 and one of booleans give the same bits, in a step too."""
    conv = ShortConvolution(D, W, dtype=torch.bfloat16)
    for length in (1, T):
        x, mask = torch.randn(B, length, D).bfloat16(), torch.tensor([[True], [False]]).expand(B, length)
        found, expected = (conv(x, mask=given, output_final_state=True) for given in (mask.float(), mask))
        assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 2
        assert all(map(torch.equal, found, expected))


SIGNATURES = {
    causal_conv1d: "x weight=None bias=None residual=None initial_state=None output_final_state=False activation=None "
    "backend=triton cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None cp_context=None kwargs",
    causal_conv1d_update: "x cache residual=None weight=None bias=None activation=None",
    ShortConvolution: "hidden_size kernel_size bias=False activation=silu backend=triton device=None dtype=None kwargs",
    ShortConvolution.forward: "self x residual=None mask=None cache=None output_final_state=False cu_seqlens=None "
    "chunk_indices=None kwargs",
}


def test_arguments_come_in_the_same_order():
    """As in fla too, if it is installed."""
    assert {function: signature(function) for function in SIGNATURES} == SIGNATURES
    fla = pytest.importorskip("fla.modules.causal_conv1d", reason="needs fla-core", exc_type=ImportError)
    for function, expected in SIGNATURES.items():
        assert signature(operator.attrgetter(function.__qualname__)(fla)) == expected


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [{}, {"T": 2}, {"bounds": PACKED}], ids=str)
def test_kernels_of_fla(sizes, monkeypatch):
    """Its own kernels, where it is installed, in the interpreter, which has no clock to choose a config by."""
    from triton.runtime.autotuner import Autotuner

    fla = pytest.importorskip("fla.modules.causal_conv1d", reason="needs fla-core", exc_type=ImportError)
    tune = Autotuner.run

    def untuned(self, *tensors, **options):
        self.configs = self.configs[:1]
        return tune(self, *tensors, **options)

    monkeypatch.setattr(Autotuner, "run", untuned)
    bounds = sizes.get("bounds")
    given = {"cu_seqlens": None if bounds is None else torch.tensor(bounds), "activation": "silu"}
    tensors = inputs(torch.float32, **sizes)
    wide = {name: t.double() for name, t in tensors.items()}
    expected, exact = gradients(lambda **t: oracle(**t, bounds=bounds, activation="silu"), wide)
    for call in (causal_conv1d, fla.causal_conv1d):
        outputs, grads = gradients(lambda call=call, **t: call(**t, **given, output_final_state=True), tensors)
        assert all(map(accuracy.close, (*outputs, *grads), (*expected, *exact)))


X, WEIGHT = torch.zeros(B, T, D), torch.zeros(D, W)
ERRORS = [
    ({"weight": None}, ValueError, "causal_conv1d: weight must be [D, W], got None"),
    ({"backend": "other"}, ValueError, "causal_conv1d: backend must be 'triton', 'cuda' or 'mix', got 'other'"),
    ({"activation": "gelu"}, ValueError, "causal_conv1d: activation must be None, 'silu' or 'swish', got 'gelu'"),
    ({"initial_state": torch.zeros(B, D, W - 1)}, ValueError,
     "causal_conv1d: initial_state must be [N, 5, 4], got [2, 5, 3]"),
    ({"cp_context": object()}, NotImplementedError,
     "causal_conv1d: there is no cp_context; pass the inputs before x as initial_state"),
]  # fmt: skip


def test_errors(conv):
    causal_conv1d(X, WEIGHT)
    for changes, error, message in ERRORS:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            causal_conv1d(**{"x": X, "weight": WEIGHT, **changes})
    packed = {"mask": X[:1, :, 0], "cu_seqlens": torch.tensor([0, T])}
    for message, use in {
        "mask and cu_seqlens exclude each other": lambda: conv(X[:1], **packed),
        "activation must be None, 'silu' or 'swish', got 'relu'": lambda: ShortConvolution(D, W, activation="relu"),
        "backend must be 'triton' or 'cuda', got 'mix'": lambda: ShortConvolution(D, W, backend="mix"),
    }.items():
        with pytest.raises(ValueError, match=f"^ShortConvolution: {message}$"):
            use()


def test_seq_idx():
    """seq_idx with or without a backend gives the result of cu_seqlens."""
    tensors = {name: t for name, t in inputs(B=1).items() if name != "initial_state"}
    ids = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)
    expected, _ = causal_conv1d(**tensors, cu_seqlens=torch.tensor([0, 4, 9]))
    assert torch.equal(causal_conv1d(**tensors, backend="mix", seq_idx=ids)[0], expected)
    assert torch.equal(causal_conv1d(**tensors, cu_seqlens=torch.tensor([0, 4, 9]), seq_idx=ids)[0], expected)
