"""Sublayers with every option, standard and shifted: against fp64 loops of their own, bit for bit among each other."""

from dataclasses import replace
from functools import partial

import pytest
import stack_oracle
import torch
from mhc_kernels import bf16, by, failures, fp16, fp32, leave_out
from networks import connections, streams
from stack_results import assert_close, assert_equal, exact, gradients
from sublayers import OPTIONS, both_forms, by_options, fp64, layer, sublayers
from torch import nn

import mhc_ops
from mhc_ops import HyperStack
from mhc_ops.mhc import recompute
from mhc_ops.testing import cases

T, D = 5, 7  # sizes that are a multiple of nothing


@pytest.fixture
def on(place):
    """The device; functions take its backend."""
    with mhc_ops.use_backend(place[0]):
        yield place[1]


def in_a_loop(x, parameters, options, shifted=False):
    """x after all sublayers; shifted, x, p and what they are contracted to."""
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], **options[0], shifted=shifted)
    for own, given in zip(parameters[1:], options[1:]):
        h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **own, **given)
    out = mhc_ops.mhc_leave(carry, layer(h_in))
    return (*out, mhc_ops.mhc_read(*out)) if shifted else (out,)


def layer_by_layer(x, parameters, options):
    for own, given in zip(parameters, options):
        x = mhc_ops.mhc_layer(x, layer, **own, **given)
    return (x,)


def unfused(x, parameters, options):
    """Runs mhc_pre, mhc_post_pre at the boundaries, and mhc_post; all options are the same."""
    (first, *others), given = parameters, options[0]
    h_in, *maps = mhc_ops.mhc_pre(x, **first, **given)
    assert (maps[1] is None) == (given.get("residual") == "identity")
    for own in others:
        x, h_in, *maps = mhc_ops.mhc_post_pre(x, layer(h_in), *maps, **own, **given)
    return (mhc_ops.mhc_post(x, layer(h_in), *maps, transposed=given.get("transposed", False)),)


def by_parts(x, parameters, options, shifted):
    """Runs mhc_maps, mhc_read and mhc_post, where nothing is fused."""
    p = torch.eye(x.shape[-2], device=x.device)[0].expand(x.shape[:-1])
    for own, given in zip(parameters, options):
        own, given = dict(own), dict(given)
        weight, eps = own.pop("layer_norm_weight", None), given.pop("layer_norm_eps", 1e-6)
        h_pre, h_post, h_res = mhc_ops.mhc_maps(x, **own, **given)
        h_in = mhc_ops.mhc_read(x.float(), p if shifted else h_pre)
        if weight is not None:
            h_in = weight * h_in * torch.rsqrt(h_in.square().mean(-1, keepdim=True) + eps)
        transposed = given.get("transposed", False)
        x, p = mhc_ops.mhc_post(x, layer(h_in.to(x.dtype)), h_post, h_res, transposed=transposed), h_pre
    return (x, p, mhc_ops.mhc_read(x, p)) if shifted else (x,)


def leaves_of(x, parameters, *more):
    return [x, *(tensor for own in parameters for tensor in own.values()), *more]


def in_doubles(x, parameters):
    wide = [{name: t.detach().double().requires_grad_() for name, t in own.items()} for own in parameters]
    return x.detach().double().requires_grad_(), wide


def assert_like_the_oracle(options, n=3, dtype=fp64, shifted=True, outer=(T,), further=(), **drawn):
    """further: ways that give the same as the loop"""
    x, parameters = sublayers(options, outer, n, D, dtype, **drawn)
    wide, double = in_doubles(x, parameters)
    scaled = []
    out = stack_oracle.stack(wide, [layer] * len(double), double, options, None, shifted, scaled)
    expected = exact((*out, stack_oracle.contract(*out)) if shifted else out, leaves_of(wide, double), scaled)
    for found in (in_a_loop(x, parameters, options, shifted), *(way(x, parameters, options) for way in further)):
        assert_close(gradients(found, leaves_of(x, parameters)), expected)


@both_forms
@by_options
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_plain_loops_in_fp64(depth, options, shifted):
    """To 1e-12, by all functions."""
    drawn = {"gamma": depth % 2 == 0, "norm": depth % 2 == 1, "n": 1 + (depth + len(options)) % 8}
    further = () if shifted else (layer_by_layer, unfused)
    assert_like_the_oracle([options] * depth, shifted=shifted, further=further, **drawn)


@both_forms
@by_options
def test_plain_loops(options, shifted, on, poisoned):
    assert_like_the_oracle([options] * 3, n=4, dtype=fp32, shifted=shifted, norm=shifted, device=on)


@both_forms
def test_sublayers_of_different_options(shifted, place, on):
    """The carry knows what its own sublayer is written back with; no kernel does such boundaries at once."""
    some = ("standard", "transposed", "identity", "post_eps")
    names, dtype = (OPTIONS, fp64) if place[0] == "reference" else (some, fp32)
    assert_like_the_oracle([OPTIONS[name] for name in names], dtype=dtype, shifted=shifted, device=on)


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("standard", "identity of Hy4", "all else")], ids=str)
@pytest.mark.parametrize("tokens", [7, 66], ids=["one launch", "several"])
@pytest.mark.parametrize(("dtype", "norm"), [(bf16, True), (bf16, False), (fp16, True)], ids=str)
def test_types(dtype, norm, tokens, options, place, on):
    """One shifted sublayer around a layer whose output is given. Few tokens are one launch in bf16."""
    x, (own,) = sublayers([options], (tokens,), 4, 33, dtype, norm=norm, device=on)
    generator = torch.Generator().manual_seed(cases.SEED + 5)
    read = torch.sigmoid(torch.randn(tokens, 4, generator=generator)).to(on).requires_grad_()
    h_out = torch.randn(tokens, 33, generator=generator).to(on, dtype).requires_grad_()
    with mhc_ops.use_backend(place[0]):
        h_in, carry = mhc_ops.mhc_enter(x, **own, **options, shifted=True, read=read)
        outputs = (h_in, *mhc_ops.mhc_leave(carry, h_out))
        results = gradients(outputs, leaves_of(x, [own], read, h_out))
    assert [output.dtype for output in outputs] == [dtype, dtype, fp32]
    wide, (double,) = in_doubles(x, [own])
    of_read, of_h_out = (t.detach().double().requires_grad_() for t in (read, h_out))
    h_ins, scaled = [], []
    given = lambda h_in: h_ins.append(h_in) or of_h_out  # noqa: E731
    out = stack_oracle.stack(wide, [given], [double], [options], of_read, True, scaled)
    leaves = leaves_of(wide, [double], of_read, of_h_out)
    assert_close(results, exact((*h_ins, *out), leaves, scaled, [output.dtype for output in outputs]))


def assert_same_bits(x, parameters, options, shifted, norm_in_torch):
    """In a loop, twice, with and without gradients; by layers; by pre and post; by parts, whose norm is torch's."""
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
    x, parameters = sublayers([{}] * 2, (5,), n, 13, dtype, gamma, norm, on)
    assert_same_bits(x, parameters, [{}] * 2, False, False)


@both_forms
def test_bits_on_kernels(shifted, kernel_device):
    with mhc_ops.use_backend("triton"):
        for name in ("identity of Hy4", "all else"):
            options = [OPTIONS[name]] * 2
            x, parameters = sublayers(options, (66,), 4, 24, bf16, norm=False, device=kernel_device)
            assert_same_bits(x, parameters, options, shifted, False)


@both_forms
@by_options
def test_bits_of_a_stack(options, shifted, place, on):
    """And of a sequential; with recompute too."""
    given = {"sinkhorn_iters": 2} | options if options.get("residual") != "identity" else options
    made, x = connections(place, layer=lambda: layer, gamma=True, layer_norm=True, **given), streams(place)
    own, ways = [dict(connection.named_parameters()) for connection in made], [] if shifted else [nn.Sequential(*made)]
    leaves = leaves_of(x, own)
    expected = gradients(in_a_loop(x, own, [given] * 3, shifted)[-1], leaves)
    for network in (*ways, *(HyperStack(*made, recompute=k, shifted=shifted) for k in (0, 2))):
        assert_equal(gradients(network(x), leaves), expected)


@by_options
def test_x_is_made_again_as_it_was_written(options):
    """What recompute does in the backward of kernels."""
    x, (own,) = sublayers([options], (T,), 3, D, bf16)
    h_in, carry = mhc_ops.mhc_enter(x, **own, **options)
    remade = recompute.Remade(x.detach(), carry, h_in, "reference")
    assert torch.equal(remade.x(), mhc_ops.mhc_leave(carry, h_in))


@pytest.mark.gpu
@by(cases.VARIANTS)
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


@pytest.mark.parametrize("n", [3, 4])
def test_kernels_return_logits(n, kernel_device):
    """mhc_forward_pre takes them from the same kernels."""
    for subject in (cases.MHC_PRE, cases.MHC_MAPS):
        logits = replace(subject, call=partial(subject.call, residual="logits"))
        assert failures(cases.Case(logits, (T,), n, D, fp32), "triton", kernel_device) == []


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
    oracle = partial(stack_oracle.stack, wide, shifted=shifted, scaled=scaled)
    found = [oracle(way, double[: len(way)], [{}] * len(way)) for way in ways]
    if shifted:
        left, found = (sum(pairs, ()) for pairs in (left, found))
    assert_close(gradients(left, leaves_of(x, (first, second))), exact(found, leaves_of(wide, double), scaled))


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_x_looked_at_is_rounded_once(dtype, kernel_device):
    """What x_next gets from elsewhere is added before its gradient is stored, whatever else is used."""
    subject = replace(cases.MHC_NEXT, intermediates=0)
    for unused in leave_out(subject):
        assert failures(cases.Case(subject, (6,), 4, 40, dtype, unused=unused), "triton", kernel_device) == [], unused


@both_forms
def test_a_carry_made_without_gradients(shifted, on):
    """It has no link, and x gets the gradient of mhc_post."""
    x, (first, second) = sublayers([{}] * 2, (6,), 4, 24, fp32, device=on)
    with torch.no_grad():
        h_in, carry = mhc_ops.mhc_enter(x, **first, shifted=shifted)
    assert carry.link is None and (carry.read is not None) == shifted and carry.x is x
    h_out = layer(h_in).requires_grad_()
    h_next, after = mhc_ops.mhc_next(carry, h_out, **second)
    results = gradients(mhc_ops.mhc_leave(after, layer(h_next)), [x, h_out, *second.values()])
    wide, (double,) = in_doubles(x, [second])
    wide_out, h_post, h_res = (t.detach().double() for t in (h_out, carry.h_post, carry.h_res))
    with mhc_ops.use_backend("reference"):
        x_next = mhc_ops.mhc_post(wide, wide_out.requires_grad_(), h_post, h_res)
    scaled, read = [], carry.read.double() if shifted else None
    expected = stack_oracle.stack(x_next, [layer], [double], [{}], read, shifted, scaled)
    assert_close(results, exact(expected, [wide, wide_out, *double.values()], scaled))


def test_links_are_made_for_gradients_only(place, on):
    x, (first, second) = sublayers([{}] * 2, (6,), 4, 24, bf16, device=on)
    h_in, carry = mhc_ops.mhc_enter(x, **first)
    _, after = mhc_ops.mhc_next(carry, layer(h_in), **second)
    assert carry.link is not None and after.link is not None
    if place[0] == "triton":
        assert after.link.untyped_storage().nbytes() == after.link.element_size()
    with torch.no_grad():
        _, inference = mhc_ops.mhc_next(carry, layer(h_in), **second)
    assert inference.link is None


@pytest.mark.interpreted
@pytest.mark.parametrize("backends", [("reference", "triton"), ("triton", "reference")], ids="-".join)
def test_a_carry_of_another_backend(backends):
    """The link of a carry means something else; x then gets the gradient of mhc_post. Triton is the last backend."""
    with mhc_ops.use_backend("triton"):
        assert_like_the_oracle([{"backend": backend} for backend in backends], dtype=fp32, shifted=False)
