"""Kernels of the shifted form and of the other maps, against the same loops."""

import pytest
import shifted_oracle
import torch
from mhc_kernels import bf16, fp16, fp32, needs
from shifted_sublayers import (
    OPTIONS,
    D,
    T,
    assert_like_the_oracle,
    both_forms,
    by_options,
    by_parts,
    in_a_loop,
    in_doubles,
    layer,
    leaves_of,
    sublayer,
    sublayer_in_oracle,
    sublayers,
)
from stack_results import assert_close, assert_equal, exact, gradients

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.testing import accuracy, cases


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ]
)
def triton_device(request):
    needs("triton")
    with mhc_ops.use_backend("triton"):
        yield request.param


@both_forms
@by_options
def test_plain_loops_on_kernels(options, shifted, triton_device, poisoned):
    """Three sublayers; the norm in one of the forms."""
    assert_like_the_oracle([options] * 3, n=4, dtype=fp32, shifted=shifted, norm=shifted, device=triton_device)


@pytest.mark.parametrize("n", range(1, 9))
def test_streams_on_kernels(n, triton_device):
    for options in ({}, {"residual": "identity"}):
        assert_like_the_oracle([options] * 2, n=n, dtype=fp32, gamma=n % 2 == 0, norm=n % 3 == 0, device=triton_device)


def test_sublayers_of_different_options_on_kernels(triton_device):
    """Boundaries between two that no kernel does at once."""
    for shifted in (False, True):
        options = [OPTIONS[name] for name in ("standard", "transposed", "identity", "post_eps")]
        assert_like_the_oracle(options, dtype=fp32, shifted=shifted, device=triton_device)


@both_forms
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("options", [{}, {"residual": "identity"}], ids=str)
def test_no_and_one_token_on_kernels(options, tokens, shifted, triton_device, poisoned):
    assert_like_the_oracle([options] * 2, dtype=fp32, outer=(tokens,), shifted=shifted, device=triton_device)


def of_sublayer(dtype, options, tokens, n, D, norm, device):
    x, (own,) = sublayers([options], (tokens,), n, D, dtype, True, norm, device=device)
    generator = torch.Generator().manual_seed(cases.SEED + 5)
    read = torch.sigmoid(torch.randn(tokens, n, generator=generator)).to(device).requires_grad_()
    h_out = torch.randn(tokens, D, generator=generator).to(device, dtype).requires_grad_()
    return x, read, h_out, own


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("standard", "identity of Hy4", "all else")], ids=str)
@pytest.mark.parametrize("tokens", [7, 66], ids=["one launch", "several"])
@pytest.mark.parametrize(("dtype", "norm"), [(bf16, True), (bf16, False), (fp16, True)], ids=str)
def test_types_on_kernels(dtype, norm, tokens, options, triton_device):
    """One shifted sublayer: outputs and gradients are rounded once. Few tokens are one launch in bf16."""
    x, read, h_out, own = of_sublayer(dtype, options, tokens, 4, 33, norm, triton_device)
    outputs = sublayer(x, read, h_out, own, options)
    results = gradients(outputs, leaves_of(x, [own], read, h_out))
    wide, (double,) = in_doubles(x, [own])
    of_read, of_h_out = (t.detach().double().requires_grad_() for t in (read, h_out))
    scaled = []
    expected = sublayer_in_oracle(wide, of_read, of_h_out, double, options, scaled)
    found = exact(expected, leaves_of(wide, [double], of_read, of_h_out), scaled, [o.dtype for o in outputs])
    assert_close(results, found)


@both_forms
def test_bits_on_kernels(shifted, triton_device):
    """The boundary has the bits of its parts, twice, with and without gradients, alone and in a batch."""
    for name in ("identity of Hy4", "all else"):
        options = OPTIONS[name]
        x, parameters = sublayers([options] * 2, (66,), 4, 24, bf16, norm=False, device=triton_device)
        outputs = in_a_loop(x, parameters, [options] * 2, shifted)
        leaves = leaves_of(x, parameters)
        assert_equal(gradients(in_a_loop(x, parameters, [options] * 2, shifted), leaves), gradients(outputs, leaves))
        with torch.no_grad():
            assert_equal(by_parts(x, parameters, options, shifted), outputs)
            alone = in_a_loop(x[3:5], parameters, [options] * 2, shifted)
        assert_equal(alone, [output[3:5] for output in outputs])


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("options", [{}, {"residual": "identity"}], ids=str)
def test_stacks_on_kernels(options, recompute, triton_device):
    """As the loop, bit for bit, and no x of every second boundary is kept."""
    torch.manual_seed(cases.SEED)
    connections = [HyperConnection(layer, 4, 24, layer_norm=True, **options) for _ in range(4)]
    stack = HyperStack(*connections, recompute=recompute, shifted=True).to(triton_device)
    x = torch.randn(6, 4, 24, device=triton_device).requires_grad_()
    own = [dict(connection.named_parameters()) for connection in connections]
    expected = gradients([in_a_loop(x, own, [options] * 4, True)[2]], [x, *stack.parameters()])
    assert_equal(gradients([stack(x)], [x, *stack.parameters()]), expected)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32])
@pytest.mark.parametrize(("outer", "n"), [((40,), 3), ((1,), 1), ((0,), 4), ((2, 3), 8)], ids=str)
def test_mean_on_kernels(outer, n, dtype, triton_device, poisoned):
    x = cases.Case(cases.MHC_PRE, outer, n, 33, dtype).inputs(triton_device)["x"].requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected = shifted_oracle.mean(wide.reshape(-1, n, 33)).reshape(*outer, 33)
    assert_close(gradients([mhc_ops.mhc_mean(x)], [x]), exact([expected], [wide], dtypes=[dtype]))


@pytest.mark.gpu
@pytest.mark.parametrize("subject", cases.VARIANTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(("T", "D"), [(2048, 4096), (4096, 2560), (2048, 320), (61, 4096)])
def test_large_sizes(subject, T, D, poisoned):
    """The boundary's own kernels, where the GPU has them; few tokens in one launch."""
    unused = ("x_next",) if "link" in subject.inputs else ()  # nobody looks at x between two sublayers
    rows = accuracy.measure(cases.Case(subject, (T,), 4, D, bf16, unused=unused), "triton", "cuda")
    assert all(row.passed for row in rows), [(r.output, r.relative_error) for r in rows if not r.passed]


@pytest.mark.gpu
@both_forms
def test_large_sublayers_of_different_options(shifted):
    """No kernel of a boundary takes a sublayer with a residual map and one without."""
    options = [OPTIONS[name] for name in ("standard", "identity", "standard", "transposed", "identity")]
    x, parameters = sublayers(options, (2048,), 4, 256, bf16, norm=False, device="cuda")
    with torch.no_grad():
        outputs = in_a_loop(x, parameters, options, shifted)
        few = in_a_loop(x[:20], parameters, options, shifted)
    assert_equal(few, [output[:20] for output in outputs])


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize("name", ["standard", "identity", "transposed"])
@pytest.mark.parametrize("norm", [False, True])
def test_bits_of_large_sizes(name, norm, shifted):
    """Kernels of a boundary, its parts, and few tokens of them; 20 times."""
    options = OPTIONS[name]
    x, parameters = sublayers([options] * 2, (2048,), 4, 2560, bf16, norm=norm, device="cuda")
    leaves = leaves_of(x, parameters)
    expected = gradients(in_a_loop(x, parameters, [options] * 2, shifted), leaves)
    count = 3 if shifted else 1
    for _ in range(20):
        assert_equal(gradients(in_a_loop(x, parameters, [options] * 2, shifted), leaves), expected)
    with torch.no_grad():
        if not norm:
            assert_equal(by_parts(x, parameters, options, shifted), expected[:count])
        few = in_a_loop(x[100:120], parameters, [options] * 2, shifted)
    assert_equal(few, [output[100:120] for output in expected[:count]])


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [3, 4])
def test_kernels_return_logits(n):
    """They make them already, for mhc_forward_pre."""
    x, (own,) = sublayers([{}], (T,), n, D, fp32, norm=False)
    wide, (double,) = in_doubles(x, [own])
    for function in (mhc_ops.mhc_pre, mhc_ops.mhc_maps):
        results = gradients(function(x, **own, residual="logits", backend="triton"), leaves_of(x, [own]))
        expected = function(wide, **double, residual="logits", backend="reference")
        assert_close(results, exact(expected, leaves_of(wide, [double])))
