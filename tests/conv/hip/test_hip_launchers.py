"""The Python launchers on CPU tensors, against fp64 autograd."""

import pytest
import torch
from hip_close import ROUNDING, assert_close

from mhc_ops.conv import contracts, hip
from mhc_ops.conv.hip import build


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        build.cpu_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


def meaning(x, weight, bias, seq_idx, initial_state, silu):
    """y and the final state, in fp64."""
    B, L, D = x.shape
    S = weight.shape[1] - 1
    past = x.new_zeros(B, S, D) if initial_state is None else initial_state.transpose(1, 2)
    longer = torch.cat([past, x], 1)
    z = x.new_zeros(B, L, D) if bias is None else bias.expand(B, L, D)
    for k in range(S + 1):
        tap = longer[:, k : k + L]
        if seq_idx is not None:
            ids = torch.cat([seq_idx[:, :1].expand(B, S), seq_idx], 1)[:, k : k + L]  # a state is of token 0's sequence
            tap = torch.where((ids == seq_idx)[..., None], tap, 0)
        z = z + tap * weight[:, k]
    y = torch.nn.functional.silu(z) if silu else z
    if seq_idx is not None:
        y = torch.where((seq_idx >= 0)[..., None], y, 0)
    return y, longer[:, L:].transpose(1, 2)


POINTERS = ("x", "weight", "bias", "seq_idx", "initial_state", "y", "final_state")
OPTIONAL = {"bias": None, "seq_idx": None, "cu_seqlens": None, "initial_state": None, "silu": True, "dilation": 1}


def forward(**inputs):
    inputs = {**OPTIONAL, "residual": None, "output_final_state": False, **inputs}
    return fill("causal_conv1d_fwd", inputs)


def backward(**inputs):
    return fill("causal_conv1d_bwd", {**OPTIONAL, "dfinal_state": None, **inputs})


def fill(name, inputs):
    """What the contract allocates, full of NaN before it is filled."""
    outputs = getattr(contracts, name).contract(**inputs)
    for output in outputs:
        output.fill_(float("nan"))
    getattr(hip, name)(**inputs, **outputs._asdict())
    return outputs


def states(B, W, D, dtype=torch.float32):
    """[B, D, W − 1] with channels side by side"""
    return torch.randn(B, W - 1, D, dtype=dtype).transpose(1, 2)


def check(B=2, L=37, D=24, W=4, dtype=torch.float32, bias=True, silu=True, ids=None, state=False, first=None, of=None):
    """first: the channel at which x begins in a tensor of 8 channels more"""
    torch.manual_seed(1)
    x = torch.randn(B, L, D, dtype=dtype)
    if first is not None:
        x = torch.randn(B, L, D + 8, dtype=dtype)[..., first : first + D]
    tensors = {
        "x": x,
        "weight": torch.randn(D, W, dtype=of or dtype) * 0.5,
        "bias": torch.randn(D, dtype=of or dtype) if bias else None,
        "initial_state": states(B, W, D, dtype) if state else None,
    }
    final = state and ids is None
    dy, dfinal = torch.randn(B, L, D, dtype=dtype), torch.randn(B, D, W - 1, dtype=dtype) if final else None

    leaves = {name: None if t is None else t.double().requires_grad_() for name, t in tensors.items()}
    y64, final64 = meaning(**leaves, seq_idx=ids, silu=silu)
    total = (y64 * dy.double()).sum() + ((final64 * dfinal.double()).sum() if final else 0)
    total.backward()

    y, last = forward(**tensors, seq_idx=ids, silu=silu, output_final_state=final)
    assert_close(y, y64, "y")
    if final:
        assert torch.equal(last.double(), final64)

    gradients = backward(**tensors, seq_idx=ids, silu=silu, dy=dy, dfinal_state=dfinal)
    for name, leaf in leaves.items():
        if leaf is not None:
            assert_close(getattr(gradients, f"d{name}"), leaf.grad, f"d{name}")


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("D", [7, 24, 300])
def test_accuracy(D, W, dtype):
    check(D=D, W=W, dtype=dtype)
    check(D=D, W=W, dtype=dtype, bias=False, silu=False, L=140, B=1)


@pytest.mark.parametrize("L", [1, 2, 3, 5, 300])
def test_states(L):
    check(L=L, state=True)
    check(L=L, D=5, state=True, dtype=torch.bfloat16, silu=False)


@pytest.mark.parametrize("D", [9, 24])
def test_packed(D):
    ids = torch.tensor([[0] * 9 + [1] * 2 + [-1] * 5 + [2] * 21, [5] + [-1] * 2 + [4] * 33 + [-1]], dtype=torch.int32)
    check(D=D, ids=ids)
    check(D=D, ids=ids, dtype=torch.bfloat16)


@pytest.mark.parametrize("D", [9, 24])
@pytest.mark.parametrize(
    "ids", [[[0, 1, 0] + [0] * 30, [7] * 2 + [-1] + [7] * 30], [[3], [-1]], [[2] * 300, [-1] * 300]], ids=len
)
def test_packed_with_a_state(ids, D):
    """The state is of the sequence of token 0, wherever that goes on."""
    seq_idx = torch.tensor(ids, dtype=torch.int32)
    for W, dtype in ((2, torch.float32), (4, torch.float32), (4, torch.bfloat16)):
        check(L=seq_idx.shape[1], D=D, W=W, ids=seq_idx, state=True, dtype=dtype)


@pytest.mark.parametrize("first", [0, 1, 8])
def test_rows_of_a_wider_tensor(first):
    check(first=first)
    check(first=first, dtype=torch.bfloat16, state=True)


def test_strides_of_single_rows():
    x = torch.randn(1, 1, 24).as_strided((1, 1, 24), (3, 5, 1))
    weight = torch.randn(24, 4)
    torch.testing.assert_close(forward(x=x, weight=weight, silu=False).y[0, 0], x[0, 0] * weight[:, 3])


def test_weights_of_another_type():
    check(dtype=torch.bfloat16, of=torch.float32)
    check(dtype=torch.float32, of=torch.bfloat16)


def test_padding_keeps_its_nan():
    ids = torch.tensor([[0] * 5 + [-1] * 5 + [1] * 5 + [-1] * 3], dtype=torch.int32)
    x, dy = torch.randn(1, 18, 8), torch.randn(1, 18, 8)
    x[ids < 0] = dy[ids < 0] = float("nan")
    inputs = {"x": x, "weight": torch.randn(8, 4), "bias": torch.randn(8), "seq_idx": ids}
    y = forward(**inputs).y
    dx, dweight, dbias, _ = backward(**inputs, dy=dy)
    for result in (y, dx, dweight, dbias):
        assert bool(result.isfinite().all())
    assert not y[ids < 0].any() and not dx[ids < 0].any()


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_to_do(shape):
    B, L, D = shape
    x, before, dafter = torch.randn(shape), states(B, 4, D), torch.randn(B, D, 3)
    inputs = {"x": x, "weight": torch.randn(D, 4), "bias": torch.randn(D), "initial_state": before}
    after = forward(**inputs, output_final_state=True).final_state
    if L == 0:
        assert torch.equal(after, before)
    gradients = backward(**inputs, dy=x, dfinal_state=dafter)
    assert not gradients.dweight.any() and not gradients.dbias.any()
    if L == 0:
        assert torch.equal(gradients.dinitial_state, dafter)


def test_what_is_missing_is_named():
    x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
    for name, wanted in {
        r"dilation \(got 2\)": {"dilation": 2},
        "residual": {"residual": x},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 4])},
        r"width 5 \(2 to 4\)": {"weight": torch.randn(8, 5)},
        "float64": {"x": x.double()},
    }.items():
        with pytest.raises(NotImplementedError, match=f"the hip backend has no {name}; use backend=.triton"):
            forward(**{"x": x, "weight": weight, **wanted})
    with pytest.raises(RuntimeError, match="runs on ROCm and on CPU tensors, the tensors are on meta"):
        forward(x=x.to("meta"), weight=weight)


def test_a_pointer_that_is_missing_or_unknown():
    x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
    for tensors in ({"x": x, "weight": weight}, dict.fromkeys([*POINTERS, "z"], x)):
        with pytest.raises(TypeError, match=r"conv_forward: takes \['x', 'weight', 'bias', "):
            hip._run(build.cpu_library(), "conv_forward", hip.Forward, tensors, silu=True)


def test_a_failed_compilation_shows_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_OPS_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="unknown_option"):
        build.compiled((build.cpu_compiler(), *build.CPU_FLAGS, "-funknown_option"))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
