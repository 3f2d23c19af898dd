"""The Python launchers on CPU tensors, against fp64 autograd."""

import pytest
import torch
from hip_close import ROUNDING, assert_close

from mhc_ops.conv import hip
from mhc_ops.conv.hip import build


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        build.cpu_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


def meaning(x, weight, bias, seq_idx, initial_state, silu):
    """y and the final state, in fp64. States are [B, S, D]."""
    B, L, D = x.shape
    S = weight.shape[1] - 1
    past = x.new_zeros(B, S, D) if initial_state is None else initial_state
    longer = torch.cat([past, x], 1)
    z = x.new_zeros(B, L, D) if bias is None else bias.expand(B, L, D)
    for k in range(S + 1):
        tap = longer[:, k : k + L]
        if seq_idx is not None:
            ids = torch.cat([seq_idx.new_full((B, S), -1), seq_idx], 1)[:, k : k + L]
            tap = torch.where((ids == seq_idx)[..., None], tap, 0)
        z = z + tap * weight[:, k]
    y = torch.nn.functional.silu(z) if silu else z
    if seq_idx is not None:
        y = torch.where((seq_idx >= 0)[..., None], y, 0)
    return y, longer[:, L:]


def check(B=2, L=37, D=24, W=4, dtype=torch.float32, bias=True, silu=True, ids=None, state=False, cut=None, of=None):
    torch.manual_seed(1)
    wide = torch.randn(B, L, D + 8 if cut is not None else D, dtype=dtype)
    x = wide if cut is None else wide[..., cut : cut + D]
    weight = torch.randn(D, W, dtype=of or dtype) * 0.5
    offset = torch.randn(D, dtype=of or dtype) if bias else None
    before = torch.randn(B, W - 1, D, dtype=dtype) if state else None
    dy, dfinal = torch.randn(B, L, D, dtype=dtype), torch.randn(B, W - 1, D, dtype=dtype) if state else None
    nan = float("nan")

    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, offset, before)]
    y64, final64 = meaning(leaves[0], leaves[1], leaves[2], ids, leaves[3], silu)
    total = (y64 * dy.double()).sum() + ((final64 * dfinal.double()).sum() if state else 0)
    total.backward()

    y = torch.full((B, L, D), nan, dtype=dtype)
    final = torch.full((B, W - 1, D) if state else (0,), nan, dtype=dtype)
    hip.causal_conv1d_fwd(x, weight, offset, None, ids, None, before, silu, 1, state, y, final)
    assert_close(y, y64, "y")
    if state:
        assert torch.equal(final.double(), final64)

    dx, dweight = torch.full_like(y, nan), torch.full_like(weight, nan)
    dbias = torch.full_like(offset, nan) if bias else weight.new_empty(0)
    dbefore = torch.full_like(before, nan) if state else x.new_empty(0)
    gradients = (dx, dweight, dbias, dbefore)
    hip.causal_conv1d_bwd(x, weight, offset, ids, None, before, dy, dfinal, silu, 1, *gradients)
    for name, gradient, leaf in zip(("dx", "dweight", "dbias", "dinitial_state"), gradients, leaves):
        if leaf is not None:
            assert_close(gradient, leaf.grad, name)


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


@pytest.mark.parametrize("cut", [0, 1, 8])
def test_rows_of_a_wider_tensor(cut):
    check(cut=cut)
    check(cut=cut, dtype=torch.bfloat16, state=True)


def test_strides_of_single_rows():
    x = torch.randn(1, 1, 24).as_strided((1, 1, 24), (3, 5, 1))
    weight, y = torch.randn(24, 4), torch.empty(1, 1, 24)
    hip.causal_conv1d_fwd(x, weight, None, None, None, None, None, False, 1, False, y, x.new_empty(0))
    torch.testing.assert_close(y[0, 0], x[0, 0] * weight[:, 3])


def test_weights_of_another_type():
    check(dtype=torch.bfloat16, of=torch.float32)
    check(dtype=torch.float32, of=torch.bfloat16)


def test_padding_keeps_its_nan():
    ids = torch.tensor([[0] * 5 + [-1] * 5 + [1] * 5 + [-1] * 3], dtype=torch.int32)
    x, dy = torch.randn(1, 18, 8), torch.randn(1, 18, 8)
    x[ids < 0] = dy[ids < 0] = float("nan")
    weight, bias = torch.randn(8, 4), torch.randn(8)
    y, dx, dweight, dbias = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    nothing = x.new_empty(0)
    hip.causal_conv1d_fwd(x, weight, bias, None, ids, None, None, True, 1, False, y, nothing)
    hip.causal_conv1d_bwd(x, weight, bias, ids, None, None, dy, None, True, 1, dx, dweight, dbias, nothing)
    for result in (y, dx, dweight, dbias):
        assert bool(result.isfinite().all())
    assert not y[ids < 0].any() and not dx[ids < 0].any()


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_to_do(shape):
    B, L, D = shape
    x, weight, bias = torch.randn(shape), torch.randn(D, 4), torch.randn(D)
    before, after, dafter = (torch.randn(B, 3, D) for _ in range(3))
    hip.causal_conv1d_fwd(x, weight, bias, None, None, None, before, True, 1, True, torch.empty(shape), after)
    if L == 0:
        assert torch.equal(after, before)
    gradients = [torch.full_like(t, float("nan")) for t in (x, weight, bias, before)]
    hip.causal_conv1d_bwd(x, weight, bias, None, None, before, x, dafter, True, 1, *gradients)
    assert not gradients[1].any() and not gradients[2].any()
    if L == 0:
        assert torch.equal(gradients[3], dafter)


def test_what_is_missing_is_named():
    x, weight, nothing = torch.randn(1, 4, 8), torch.randn(8, 4), torch.empty(0)

    def forward(x=x, weight=weight, residual=None, cu_seqlens=None, dilation=1):
        hip.causal_conv1d_fwd(x, weight, None, residual, None, cu_seqlens, None, False, dilation, False, x, nothing)

    for name, call in {
        r"dilation \(got 2\)": lambda: forward(dilation=2),
        "residual": lambda: forward(residual=x),
        "cu_seqlens": lambda: forward(cu_seqlens=torch.tensor([0, 4])),
        r"width 5 \(2 to 4\)": lambda: forward(weight=torch.randn(8, 5)),
        "float64": lambda: forward(x=x.double()),
    }.items():
        with pytest.raises(NotImplementedError, match=f"the hip backend has no {name}; use backend=.triton"):
            call()
    with pytest.raises(RuntimeError, match="runs on ROCm and on CPU tensors, the tensors are on meta"):
        forward(x=x.to("meta"))


def test_a_failed_compilation_shows_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_OPS_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="unknown_option"):
        build.compiled((build.cpu_compiler(), *build.CPU_FLAGS, "-funknown_option"))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
