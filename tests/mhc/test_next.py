"""The loop of a stack by its functions: mhc_enter, mhc_next and mhc_leave, which hand a carry on."""

import pytest
import stack_oracle
import torch
from mhc_kernels import bf16, fp16, fp32
from stack_results import PLACES, assert_close, assert_equal, exact, gradients

import mhc_ops
from mhc_ops.testing import accuracy, cases


@pytest.fixture(params=PLACES)
def place(request):
    if request.param[0] == "triton":
        pytest.importorskip("triton")
    return request.param


def sublayers(count, outer, n, D, dtype, gamma=True, norm=True, device="cpu"):
    """x, and the parameters of so many sublayers by their names; all need a gradient."""
    drawn = [
        cases.Case(cases.MHC_PRE_NORMED, outer, n, D, dtype, gamma=gamma, seed=cases.SEED + i).inputs(device)
        for i in range(count)
    ]
    x, *_ = [tensors.pop("x") for tensors in drawn]
    if not norm:
        for tensors in drawn:
            del tensors["layer_norm_weight"]
    return x.requires_grad_(), [{k: t.requires_grad_() for k, t in tensors.items()} for tensors in drawn]


def layer(h_in):
    return torch.tanh(h_in) + 0.5 * h_in


def in_a_loop(x, parameters, backend):
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backend)
    for own in parameters[1:]:
        h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **own, backend=backend)
    return mhc_ops.mhc_leave(carry, layer(h_in), backend=backend)


def one_by_one(x, parameters, backend):
    for own in parameters:
        x = mhc_ops.mhc_layer(x, layer, **own, backend=backend)
    return x


def unfused(x, parameters, backend):
    """Every sublayer by mhc_pre and mhc_post."""
    for own in parameters:
        h_in, h_post, h_res = mhc_ops.mhc_pre(x, **own, backend=backend)
        x = mhc_ops.mhc_post(x, layer(h_in), h_post, h_res, backend=backend)
    return x


def leaves_of(x, parameters):
    return [x, *(tensor for own in parameters for tensor in own.values())]


def in_doubles(x, parameters):
    wide = [{name: t.detach().double().requires_grad_() for name, t in own.items()} for own in parameters]
    return x.detach().double().requires_grad_(), wide


# n, type, gamma, norm: each n, and each two of the others together; all types of the usual n
KINDS = [
    (1, fp16, False, True),
    (2, fp32, True, True),
    (3, bf16, False, False),
    (4, bf16, True, True),
    (4, fp16, True, False),
    (4, fp32, False, True),
    (5, fp32, True, False),
    (6, bf16, False, True),
    (7, fp16, True, True),
    (8, fp32, False, False),
]


@pytest.mark.parametrize(("n", "dtype", "gamma", "norm"), KINDS, ids=str)
def test_bits_of_layers(n, dtype, gamma, norm, place, poisoned):
    """Forward and backward, an odd number of channels."""
    x, parameters = sublayers(2, (5,), n, 13, dtype, gamma, norm, place[1])
    leaves = leaves_of(x, parameters)
    expected = gradients(one_by_one(x, parameters, place[0]), leaves)
    assert_equal(gradients(in_a_loop(x, parameters, place[0]), leaves), expected)
    with torch.no_grad():
        assert torch.equal(in_a_loop(x, parameters, place[0]), expected[0])
        assert torch.equal(unfused(x, parameters, place[0]), expected[0])


@pytest.mark.parametrize(
    ("outer", "norm"), [((), True), ((1,), False), ((0,), True), ((2, 0), False), ((2, 3), True)], ids=str
)
def test_few_and_no_tokens(outer, norm, place, poisoned):
    x, parameters = sublayers(2, outer, 4, 12, fp32, True, norm, place[1])
    results = gradients(in_a_loop(x, parameters, place[0]), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    assert_close(results, exact(in_a_loop(wide, double, "reference"), leaves_of(wide, double)))
    if 0 in outer:
        assert not any(gradient.any() for gradient in results[1:])


@pytest.mark.parametrize(("n", "norm"), [(2, False), (4, True), (7, False)])
def test_gradients(n, norm, place):
    """Three sublayers against fp64 autograd of mhc_pre and mhc_post."""
    x, parameters = sublayers(3, (6,), n, 24, fp32, True, norm, place[1])
    results = gradients(in_a_loop(x, parameters, place[0]), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    assert_close(results, exact(unfused(wide, double, "reference"), leaves_of(wide, double)))


@pytest.mark.parametrize(("n", "gamma", "norm"), [(1, True, False), (2, False, True), (3, True, True)])
def test_plain_loops(n, gamma, norm, place):
    """Against loops over streams that know nothing of the reference, forward and backward."""
    x, parameters = sublayers(3, (2,), n, 4, fp32, gamma, norm, place[1])
    results = gradients(in_a_loop(x, parameters, place[0]), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    maps = [[own.get(name) for name in ("phi", "alpha", "bias", "gamma")] for own in double]
    weights = [own.get("layer_norm_weight") for own in double]
    expected = stack_oracle.stack(wide, [layer] * 3, maps, weights)
    assert_close(results, exact(expected, leaves_of(wide, double)))


def branched(x, parameters, backend):
    """Two ways on from one carry, and one of them ends twice."""
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backend)
    one, other = layer(h_in), torch.sin(h_in)
    h_next, after = mhc_ops.mhc_next(carry, one, **parameters[1], backend=backend)
    ends = [mhc_ops.mhc_leave(after, h_out, backend=backend) for h_out in (layer(h_next), torch.sin(h_next))]
    return *ends, mhc_ops.mhc_leave(carry, other, backend=backend)


def branched_unfused(x, parameters, backend):
    h_in, *maps = mhc_ops.mhc_pre(x, **parameters[0], backend=backend)
    one, other = (mhc_ops.mhc_post(x, h_out, *maps, backend=backend) for h_out in (layer(h_in), torch.sin(h_in)))
    h_next, *maps = mhc_ops.mhc_pre(one, **parameters[1], backend=backend)
    ends = [mhc_ops.mhc_post(one, h_out, *maps, backend=backend) for h_out in (layer(h_next), torch.sin(h_next))]
    return *ends, other


def looked_at(x, parameters, backend):
    """What else is made of x between the sublayers, and of the maps."""
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backend)
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1], backend=backend)
    seen = (after.x.square(), carry.h_post.square(), after.h_res.square())
    return mhc_ops.mhc_leave(after, layer(h_next), backend=backend), *seen


def looked_at_unfused(x, parameters, backend):
    h_in, h_post, h_res = mhc_ops.mhc_pre(x, **parameters[0], backend=backend)
    between = mhc_ops.mhc_post(x, layer(h_in), h_post, h_res, backend=backend)
    h_next, *maps = mhc_ops.mhc_pre(between, **parameters[1], backend=backend)
    end = mhc_ops.mhc_post(between, layer(h_next), *maps, backend=backend)
    return end, between.square(), h_post.square(), maps[1].square()


@pytest.mark.parametrize(("call", "truth"), [(branched, branched_unfused), (looked_at, looked_at_unfused)])
@pytest.mark.parametrize("norm", [False, True])
def test_a_carry_used_twice_and_x_looked_at(call, truth, norm, place):
    x, parameters = sublayers(2, (6,), 4, 24, fp32, True, norm, place[1])
    results = gradients(call(x, parameters, place[0]), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    assert_close(results, exact(truth(wide, double, "reference"), leaves_of(wide, double)))


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_x_looked_at_is_rounded_once(dtype, kernel_device):
    """What x_next gets from elsewhere is added before its gradient is stored."""
    pytest.importorskip("triton")
    case = cases.Case(cases.MHC_NEXT, (40,), 4, 40, dtype)
    tensors = case.inputs(kernel_device)
    looking = cases.replace(case.subject, intermediates=0)
    cotangents = accuracy.random_cotangents(looking, accuracy.run(looking, tensors, "triton"))
    results = accuracy.run(looking, tensors, "triton", cotangents)
    truth = accuracy.truth(looking, tensors, cotangents, results)
    assert [name for name in truth if not accuracy.close(results[name], truth[name])] == []


@pytest.mark.parametrize("used", ["h_in", "x"])
def test_unused_outputs(used, place):
    def call(x, parameters, backend):
        h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backend)
        h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1], backend=backend)
        return h_next if used == "h_in" else after.x

    def truth(x, parameters, backend):
        h_in, *maps = mhc_ops.mhc_pre(x, **parameters[0], backend=backend)
        between = mhc_ops.mhc_post(x, layer(h_in), *maps, backend=backend)
        return mhc_ops.mhc_pre(between, **parameters[1], backend=backend)[0] if used == "h_in" else between

    x, parameters = sublayers(2, (6,), 4, 24, fp32, device=place[1])
    results = gradients(call(x, parameters, place[0]), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    assert_close(results, exact(truth(wide, double, "reference"), leaves_of(wide, double)))


def test_a_carry_made_without_gradients(place):
    """It has no link, and x gets the gradient of mhc_post."""
    x, (first, second) = sublayers(2, (6,), 4, 24, fp32, device=place[1])
    with torch.no_grad():
        h_in, carry = mhc_ops.mhc_enter(x, **first, backend=place[0])
    assert carry.link is None
    assert carry.read is None
    assert carry.x is x
    h_out = layer(h_in).requires_grad_()
    leaves = [x, h_out, *second.values()]

    def on(carry, h_out, own, backend):
        h_next, after = mhc_ops.mhc_next(carry, h_out, **own, backend=backend)
        return mhc_ops.mhc_leave(after, layer(h_next), backend=backend)

    results = gradients(on(carry, h_out, second, place[0]), leaves)
    wide, wide_out = (t.detach().double().requires_grad_() for t in (x, h_out))
    maps = [t.double() for t in (carry.h_post, carry.h_res)]
    _, (double,) = in_doubles(x, [second])
    between = mhc_ops.mhc_post(wide, wide_out, *maps, backend="reference")
    expected = exact(unfused(between, [double], "reference"), [wide, wide_out, *double.values()])
    assert_close(results, expected)


def test_links_are_made_for_gradients_only(place):
    x, (first, second) = sublayers(2, (6,), 4, 24, bf16, device=place[1])
    h_in, carry = mhc_ops.mhc_enter(x, **first, backend=place[0])
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **second, backend=place[0])
    assert carry.link is not None
    assert after.link is not None
    if place[0] == "triton":
        assert after.link.untyped_storage().nbytes() == after.link.element_size()
    with torch.no_grad():
        again, inference = mhc_ops.mhc_next(carry, layer(h_in), **second, backend=place[0])
    assert inference.link is None
    assert_equal([again, *inference[:3]], [h_next, *after[:3]])


@pytest.mark.interpreted
@pytest.mark.parametrize("backends", [("reference", "triton", "triton"), ("triton", "reference", "triton")], ids=str)
def test_a_carry_of_another_backend(backends):
    """Its link means something else there; x then gets the gradient of mhc_post."""
    x, parameters = sublayers(2, (6,), 4, 24, fp32)
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], backend=backends[0])
    h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1], backend=backends[1])
    out = mhc_ops.mhc_leave(carry, layer(h_in), backend=backends[2])
    wide, double = in_doubles(x, parameters)
    expected = exact(unfused(wide, double, "reference"), leaves_of(wide, double))
    assert_close(gradients(out, leaves_of(x, parameters)), expected)


def test_strided_streams(place):
    x, parameters = sublayers(2, (6,), 4, 24, bf16, device=place[1])
    leaves = [tensor for own in parameters for tensor in own.values()]
    expected = gradients(in_a_loop(x, parameters, place[0]), leaves)
    assert_equal(gradients(in_a_loop(x.mT.contiguous().mT, parameters, place[0]), leaves), expected)


def test_what_is_checked():
    x, (own,) = sublayers(1, (6,), 4, 24, fp32)
    h_in, carry = mhc_ops.mhc_enter(x, **own)
    for name, further in (("mhc_next", own), ("mhc_leave", {})):
        function = getattr(mhc_ops, name)
        message = rf"^{name}: carry must be what mhc_enter or mhc_next returned, got Tensor$"
        with pytest.raises(TypeError, match=message):
            function(x, h_in, **further)
        with pytest.raises(ValueError, match=rf"^{name}: h_out must be \[6, 24\], got \[6, 4, 24\]$"):
            function(carry, x, **further)
        with pytest.raises(TypeError, match=rf"^{name}: h_out must be a torch.Tensor, got NoneType$"):
            function(carry, None, **further)
    with pytest.raises(ValueError, match=r"^mhc_enter: phi must be \[24, 96\], got \[3\]$"):
        mhc_ops.mhc_enter(x, own["alpha"], own["alpha"], own["bias"])
    for name, arguments in (("mhc_enter", (x,)), ("mhc_next", (carry, h_in))):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'norm_ep'$"):
            getattr(mhc_ops, name)(*arguments, **own, norm_ep=1e-6)
