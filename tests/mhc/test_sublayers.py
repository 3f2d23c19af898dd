"""Sublayers by their functions, standard and shifted, with every option: against plain fp64 loops that know nothing of
the reference, and bit for bit against each other."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from mhc_kernels import bf16, failures, fp16, fp32, leave_out
from stack_oracle import stack
from stack_results import assert_close, assert_equal, exact, gradients
from sublayers import (
    OPTIONS,
    D,
    T,
    assert_like_the_oracle,
    assert_rounded_once,
    both_forms,
    by_options,
    by_parts,
    fp64,
    in_a_loop,
    in_doubles,
    in_oracle,
    layer,
    layer_by_layer,
    leaves_of,
    sublayers,
    unfused,
)

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.mhc import recompute
from mhc_ops.testing import accuracy, cases


@pytest.fixture
def on(place):
    """The device; functions take its backend."""
    with mhc_ops.use_backend(place[0]):
        yield place[1]


# Against the loops, forward and backward


@both_forms
@by_options
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_plain_loops_in_fp64(depth, options, shifted):
    """To 1e-12."""
    assert_like_the_oracle([options] * depth, shifted=shifted, gamma=depth % 2 == 0, norm=depth % 2 == 1)


@both_forms
@by_options
def test_plain_loops(options, shifted, on, poisoned):
    """Three sublayers; the norm in one of the forms."""
    assert_like_the_oracle([options] * 3, n=4, dtype=fp32, shifted=shifted, norm=shifted, device=on)


@pytest.mark.parametrize("n", range(1, 9))
def test_streams(n, place, on):
    """Also sublayers without norm and gamma, and standard ones with them."""
    dtypes = (fp64, fp32) if place[0] == "reference" else (fp32,)
    for dtype, shifted, residual in product(dtypes, (False, True), ("sinkhorn", "identity")):
        own = {"gamma": (n + shifted) % 2 == 0, "norm": n % 3 != shifted}
        assert_like_the_oracle([{"residual": residual}] * 2, n=n, dtype=dtype, shifted=shifted, device=on, **own)


@both_forms
def test_sublayers_of_different_options(shifted, place, on):
    """The carry knows what its own sublayer is written back with; no kernel does such boundaries at once."""
    names, dtype = (
        (OPTIONS, fp64) if place[0] == "reference" else (("standard", "transposed", "identity", "post_eps"), fp32)
    )
    assert_like_the_oracle([OPTIONS[name] for name in names], dtype=dtype, shifted=shifted, device=on)


@pytest.mark.parametrize("outer", [(), (0,), (1,), (2, 0), (2, 3)], ids=str)
def test_tokens(outer, on, poisoned):
    for shifted, residual in product((False, True), ("sinkhorn", "identity")):
        assert_like_the_oracle([{"residual": residual}] * 2, dtype=fp32, outer=outer, shifted=shifted, device=on)


# One rounding in every type

KINDS = [  # dtype of x, of the parameters, n, gamma, norm
    (bf16, fp32, 4, True, True),
    (bf16, bf16, 3, False, False),
    (fp16, fp32, 4, False, True),
    (fp16, fp32, 1, True, True),
    (fp32, bf16, 5, True, False),
    (fp32, fp64, 2, False, True),
]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(("dtype", "parameter_dtype", "n", "gamma", "norm"), KINDS, ids=str)
def test_types(dtype, parameter_dtype, n, gamma, norm, scale):
    """x, what it is read with, h_out and all parameters."""
    drawn = {"gamma": gamma, "norm": norm, "scale": scale, "parameter_dtype": parameter_dtype}
    for options in OPTIONS.values():
        assert_rounded_once(options, 40, n, dtype, **drawn)


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("standard", "identity of Hy4", "all else")], ids=str)
@pytest.mark.parametrize("tokens", [7, 66], ids=["one launch", "several"])
@pytest.mark.parametrize(("dtype", "norm"), [(bf16, True), (bf16, False), (fp16, True)], ids=str)
def test_types_on_kernels(dtype, norm, tokens, options, kernel_device):
    """Few tokens are one launch in bf16."""
    with mhc_ops.use_backend("triton"):
        assert_rounded_once(options, tokens, 4, dtype, kernel_device, norm=norm)


@pytest.mark.parametrize(("outer", "n"), [((40,), 3), ((1,), 1), ((0,), 4), ((2, 3), 8)], ids=str)
def test_mean(outer, n, place, on, poisoned):
    for dtype in (bf16, fp16, fp32, fp64) if place[0] == "reference" else (bf16, fp16, fp32):
        x = cases.Case(cases.MHC_PRE, outer, n, 33, fp32).inputs(on)["x"].to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        out, expected = mhc_ops.mhc_mean(x), sum(wide.unbind(-2)) / n
        assert out.dtype == dtype
        assert_close(gradients([out], [x]), exact([expected], [wide], dtypes=[dtype]))
        with torch.autocast(on, bf16):
            assert torch.equal(mhc_ops.mhc_mean(x), out)


# The same bits on every way


def assert_same_bits(x, parameters, options, shifted, norm_in_torch):
    """In a loop, twice, with and without gradients; by layers; by pre and post; by parts, whose norm is torch's: only
    the reference has its bits."""
    leaves, count = leaves_of(x, parameters), 3 if shifted else 1
    expected = gradients(in_a_loop(x, parameters, options, shifted), leaves)
    ways = [in_a_loop(x, parameters, options, shifted)] + ([] if shifted else [layer_by_layer(x, parameters, options)])
    for outputs in ways:
        assert_equal(gradients(outputs, leaves), expected)
    with torch.no_grad():
        ways = [in_a_loop(x, parameters, options, shifted)] + ([] if shifted else [unfused(x, parameters, options)])
        if norm_in_torch or "layer_norm_weight" not in parameters[0]:
            ways.append(by_parts(x, parameters, options, shifted))
        for outputs in ways:
            assert_equal(outputs, expected[:count])


@both_forms
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32])
def test_bits_with_every_option(dtype, shifted):
    for options in OPTIONS.values():
        x, parameters = sublayers([options] * 3, (5,), 3, D, dtype)
        assert_same_bits(x, parameters, [options] * 3, shifted, True)


# n, type, gamma, norm: each n, and each two of the others together; all types of the usual n
OF_EVERY_N = [
    *[(1, fp16, False, True), (2, fp32, True, True), (3, bf16, False, False), (4, bf16, True, True)],
    *[(4, fp16, True, False), (4, fp32, False, True), (5, fp32, True, False), (6, bf16, False, True)],
    *[(7, fp16, True, True), (8, fp32, False, False)],
]


@pytest.mark.parametrize(("n", "dtype", "gamma", "norm"), OF_EVERY_N, ids=str)
def test_bits_of_every_n(n, dtype, gamma, norm, on, poisoned):
    """An odd number of channels."""
    x, parameters = sublayers([{}] * 2, (5,), n, 13, dtype, gamma, norm, on)
    assert_same_bits(x, parameters, [{}] * 2, False, False)


@both_forms
def test_bits_on_kernels(shifted, kernel_device):
    """Also of some tokens alone."""
    with mhc_ops.use_backend("triton"):
        for name in ("identity of Hy4", "all else"):
            options = [OPTIONS[name]] * 2
            x, parameters = sublayers(options, (66,), 4, 24, bf16, norm=False, device=kernel_device)
            assert_same_bits(x, parameters, options, shifted, False)
            with torch.no_grad():
                alone, among = (in_a_loop(given, parameters, options, shifted) for given in (x[3:5], x))
            assert_equal(alone, [output[3:5] for output in among])


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("options", [{}, {"residual": "identity"}], ids=str)
def test_bits_of_a_shifted_stack(options, recompute, on):
    torch.manual_seed(cases.SEED)
    connections = [HyperConnection(layer, 4, 24, layer_norm=True, **options) for _ in range(4)]
    shifted = HyperStack(*connections, recompute=recompute, shifted=True).to(on)
    x = torch.randn(6, 4, 24, device=on).requires_grad_()
    own, leaves = [dict(connection.named_parameters()) for connection in connections], [x, *shifted.parameters()]
    assert_equal(gradients([shifted(x)], leaves), gradients([in_a_loop(x, own, [options] * 4, True)[2]], leaves))


def test_bits_of_strided_streams(on):
    x, parameters = sublayers([{}] * 2, (6,), 4, 24, bf16, device=on)
    _, *leaves = leaves_of(x, parameters)
    expected = gradients(in_a_loop(x, parameters, [{}] * 2), leaves)
    assert_equal(gradients(in_a_loop(x.mT.contiguous().mT, parameters, [{}] * 2), leaves), expected)


@by_options
def test_x_is_made_again_as_it_was_written(options):
    """What recompute does in the backward of kernels."""
    x, (own,) = sublayers([options], (T,), 3, D, bf16)
    h_in, carry = mhc_ops.mhc_enter(x, **own, **options)
    remade = recompute.Remade(x.detach(), carry, h_in, "reference")
    assert torch.equal(remade.x(), mhc_ops.mhc_leave(carry, h_in))


@pytest.mark.gpu
@pytest.mark.parametrize("subject", cases.VARIANTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(("T", "D"), [(2048, 4096), (4096, 2560), (2048, 320), (61, 4096)])
def test_large_sizes(subject, T, D, poisoned):
    """The boundary's own kernels, where the GPU has them; few tokens in one launch."""
    unused = ("x_next",) if "link" in subject.inputs else ()  # nothing else reads x between two sublayers
    assert failures(cases.Case(subject, (T,), 4, D, bf16, unused=unused), "triton", "cuda") == []


SAME = [([OPTIONS[name]] * 2, 2560, norm) for name in ("standard", "identity", "transposed") for norm in (False, True)]
DIFFERENT = [OPTIONS[name] for name in ("standard", "identity", "standard", "transposed", "identity")]


@pytest.mark.gpu
@both_forms
@pytest.mark.parametrize(("options", "D", "norm"), [*SAME, (DIFFERENT, 256, True)], ids=str)
def test_bits_of_large_sizes(options, D, norm, shifted):
    """Kernels of a boundary, its parts, and few tokens of them; 20 times."""
    x, parameters = sublayers(options, (2048,), 4, D, bf16, norm=norm, device="cuda")
    leaves, count = leaves_of(x, parameters), 3 if shifted else 1
    expected = gradients(in_a_loop(x, parameters, options, shifted), leaves)
    for _ in range(20):
        assert_equal(gradients(in_a_loop(x, parameters, options, shifted), leaves), expected)
    with torch.no_grad():
        if not norm:
            assert_equal(by_parts(x, parameters, options, shifted), expected[:count])
        few = in_a_loop(x[100:120], parameters, options, shifted)
    assert_equal(few, [output[100:120] for output in expected[:count]])


# Other ways through the functions


@by_options
def test_functions_take_them(options):
    """mhc_pre, mhc_post, mhc_post_pre, mhc_layer: one sublayer, its boundary, and all in one."""
    x, parameters = sublayers([options] * 2, (T,), 3, D, fp64)
    leaves = leaves_of(x, parameters)
    h_in, h_post, h_res = mhc_ops.mhc_pre(x, **parameters[0], **options)
    assert (h_res is None) == (options.get("residual") == "identity")
    x_next, h_in, *maps = mhc_ops.mhc_post_pre(x, layer(h_in), h_post, h_res, **parameters[1], **options)
    fused = mhc_ops.mhc_post(x_next, layer(h_in), *maps, transposed=options.get("transposed", False))
    expected = exact(in_oracle(x, parameters, [options] * 2), leaves)
    for out in ((fused,), *(way(x, parameters, [options] * 2) for way in (unfused, layer_by_layer))):
        assert_close(gradients(out, leaves), expected)


def test_logits():
    """h_res is the input of Sinkhorn; the rest is that of mhc_pre."""
    x, (own,) = sublayers([{}], (T,), 3, D, fp64)
    h_in, h_post, logits = mhc_ops.mhc_pre(x, **own, residual="logits")
    expected = mhc_ops.mhc_pre(x, **own)
    assert_equal([h_in, h_post, mhc_ops.sinkhorn(logits)], expected)
    del own["layer_norm_weight"]
    _, *forward_pre = mhc_ops.mhc_forward_pre(x, **own)
    assert_equal([h_post, logits], forward_pre)
    assert_equal(mhc_ops.mhc_maps(x, **own, residual="logits")[1:], forward_pre)


@pytest.mark.interpreted
@pytest.mark.parametrize("n", [3, 4])
def test_kernels_return_logits(n):
    """mhc_forward_pre takes them from the same kernels."""
    x, (own,) = sublayers([{}], (T,), n, D, fp32, norm=False)
    wide, (double,) = in_doubles(x, [own])
    for function in (mhc_ops.mhc_pre, mhc_ops.mhc_maps):
        results = gradients(function(x, **own, residual="logits", backend="triton"), leaves_of(x, [own]))
        expected = function(wide, **double, residual="logits", backend="reference")
        assert_close(results, exact(expected, leaves_of(wide, [double])))


@both_forms
@pytest.mark.parametrize("name", ["standard", "identity of Hy4", "transposed", "no eps"])
def test_gradgradcheck(name, shifted):
    options = [{**OPTIONS[name], "layer_norm_eps": 0.1}] * 2
    if name != "identity of Hy4":
        options = [{**own, "sinkhorn_iters": 2} for own in options]
    x, parameters = sublayers(options, (1,), 2, 2, fp64)
    names = [list(own) for own in parameters]

    def call(x, *values):
        values = iter(values)
        return in_a_loop(x, [{name: next(values) for name in own} for own in names], options, shifted)[-1]

    leaves = leaves_of(x, parameters)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


# The carry


@both_forms
@pytest.mark.parametrize("norm", [False, True])
def test_a_carry_used_twice(norm, shifted, on):
    """Two ways on from one carry, and one of them ends twice."""
    x, (first, second) = sublayers([{}] * 2, (6,), 4, 24, fp32, norm=norm, device=on)
    h_in, carry = mhc_ops.mhc_enter(x, **first, shifted=shifted)
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **second)
    ends = [(after, layer(h_next)), (after, torch.sin(h_next)), (carry, torch.sin(h_in))]
    left = [mhc_ops.mhc_leave(*end) for end in ends]
    wide, double = in_doubles(x, (first, second))
    ways, scaled = [(layer, layer), (layer, torch.sin), (torch.sin,)], []
    found = [stack(wide, way, double[: len(way)], [{}] * len(way), shifted=shifted, scaled=scaled) for way in ways]
    if shifted:
        left, found = (sum(pairs, ()) for pairs in (left, found))
    assert_close(gradients(left, leaves_of(x, (first, second))), exact(found, leaves_of(wide, double), scaled))


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_x_looked_at_is_rounded_once(dtype, kernel_device):
    """What x_next gets from elsewhere is added before its gradient is stored, whatever else is used."""
    subject = replace(cases.MHC_NEXT, intermediates=0)
    for unused in leave_out(subject):
        assert failures(cases.Case(subject, (6,), 4, 40, dtype, unused=unused), "triton", kernel_device) == [], unused


def test_a_carry_made_without_gradients(on):
    """It has no link, and x gets the gradient of mhc_post."""
    x, (first, second) = sublayers([{}] * 2, (6,), 4, 24, fp32, device=on)
    with torch.no_grad():
        h_in, carry = mhc_ops.mhc_enter(x, **first)
    assert carry.link is None and carry.read is None and carry.x is x
    h_out = layer(h_in).requires_grad_()
    h_next, after = mhc_ops.mhc_next(carry, h_out, **second)
    results = gradients(mhc_ops.mhc_leave(after, layer(h_next)), [x, h_out, *second.values()])
    wide, wide_out = (t.detach().double().requires_grad_() for t in (x, h_out))
    _, (double,) = in_doubles(x, [second])
    maps = [t.double() for t in (carry.h_post, carry.h_res)]
    with mhc_ops.use_backend("reference"):
        (expected,) = unfused(mhc_ops.mhc_post(wide, wide_out, *maps), [double], [{}])
    assert_close(results, exact(expected, [wide, wide_out, *double.values()]))


def test_a_shifted_carry_made_without_gradients():
    x, parameters = sublayers([{}] * 2, (T,), 3, D, fp64)
    with torch.no_grad():
        h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], shifted=True)
    assert carry.link is None
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1])
    out, p = mhc_ops.mhc_leave(after, layer(h_next))
    assert_close([out, p], [accuracy.Exact(e.detach()) for e in in_oracle(x, parameters, [{}] * 2, True)[:2]])
    assert torch.autograd.grad(out.sum(), x)[0].abs().max() > 0


def test_the_gradient_of_p_is_one_boundary_earlier():
    """The first h_pre reads x between the sublayers; the second only the end."""
    x, parameters = sublayers([{}] * 2, (T,), 3, D, fp64)
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], shifted=True)
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1])
    dread = torch.autograd.grad(h_next.sum(), [carry.read, parameters[1]["phi"]], allow_unused=True, retain_graph=True)
    assert dread[0].abs().max() > 0
    assert dread[1] is None
    out, p = mhc_ops.mhc_leave(after, layer(h_next))
    assert p is after.read
    rows = torch.autograd.grad(mhc_ops.mhc_read(out, p).sum(), parameters[1]["phi"])[0].abs().amax(-1)
    assert (rows[:3] > 0).all()


def test_links_are_made_for_gradients_only(place, on):
    x, (first, second) = sublayers([{}] * 2, (6,), 4, 24, bf16, device=on)
    h_in, carry = mhc_ops.mhc_enter(x, **first)
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **second)
    assert carry.link is not None and after.link is not None
    if place[0] == "triton":
        assert after.link.untyped_storage().nbytes() == after.link.element_size()
    with torch.no_grad():
        again, inference = mhc_ops.mhc_next(carry, layer(h_in), **second)
    assert inference.link is None
    assert_equal([again, *inference[:3]], [h_next, *after[:3]])


@pytest.mark.interpreted
@pytest.mark.parametrize("backends", [("reference", "triton", "triton"), ("triton", "reference", "triton")], ids=str)
def test_a_carry_of_another_backend(backends):
    """Its link means something else there; x then gets the gradient of mhc_post."""
    x, parameters = sublayers([{}] * 2, (6,), 4, 24, fp32)
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backends[0])
    h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1], backend=backends[1])
    out = mhc_ops.mhc_leave(carry, layer(h_in), backend=backends[2])
    wide, double = in_doubles(x, parameters)
    scaled = []
    expected = exact(in_oracle(wide, double, [{}] * 2, scaled=scaled), leaves_of(wide, double), scaled)
    assert_close(gradients(out, leaves_of(x, parameters)), expected)
