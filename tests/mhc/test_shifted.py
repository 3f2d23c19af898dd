"""The shifted form, where a sublayer reads with the weights of the one before, and the other maps: against plain fp64
loops that know nothing of the reference."""

import copy
from itertools import product

import pytest
import shifted_oracle
import torch
from mhc_kernels import bf16, fp16, fp32
from shifted_sublayers import (
    OPTIONS,
    D,
    T,
    assert_like_the_oracle,
    both_forms,
    by_options,
    by_parts,
    fp64,
    in_a_loop,
    in_doubles,
    in_oracle,
    layer,
    leaves_of,
    sublayer,
    sublayer_in_oracle,
    sublayers,
)
from stack_results import assert_close, assert_equal, exact, gradients
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.mhc import prepare, recompute
from mhc_ops.mhc.options import DEFAULTS, NOT_IN_TILELANG
from mhc_ops.testing import accuracy, cases

# Against the loops


@both_forms
@by_options
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_plain_loops(depth, options, shifted):
    """In fp64, forward and backward, to 1e-12."""
    assert_like_the_oracle([options] * depth, shifted=shifted, gamma=depth % 2 == 0, norm=depth % 2 == 1)


@both_forms
@by_options
def test_plain_loops_in_fp32(options, shifted):
    assert_like_the_oracle([options] * 3, n=4, dtype=fp32, shifted=shifted)


@both_forms
def test_sublayers_of_different_options(shifted):
    """The carry knows what its own sublayer is written back with."""
    assert_like_the_oracle(list(OPTIONS.values()), shifted=shifted)


@pytest.mark.parametrize("n", range(1, 9))
def test_streams(n):
    for dtype, options in product((fp64, fp32), ({}, {"residual": "identity"})):
        assert_like_the_oracle([options] * 2, n=n, dtype=dtype, gamma=n % 2 == 0, norm=n % 3 == 0)


@both_forms
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("options", [{"norm_eps": 1e-20}, {"residual": "identity"}], ids=str)
def test_scales(options, scale, shifted):
    assert_like_the_oracle([options] * 2, dtype=fp32, scale=scale, shifted=shifted)


@both_forms
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("options", [{}, {"residual": "identity"}], ids=str)
def test_no_and_one_token(options, tokens, shifted, poisoned):
    assert_like_the_oracle([options] * 2, dtype=fp32, outer=(tokens,), shifted=shifted)


@pytest.mark.parametrize("outer", [(), (2, 2), (2, 0)], ids=str)
def test_leading_dimensions(outer):
    x, parameters = sublayers([{}] * 2, outer, 3, D, fp64)
    results = gradients(in_a_loop(x, parameters, [{}] * 2, True), leaves_of(x, parameters))
    flat = x.detach().reshape(-1, 3, D).requires_grad_()
    outputs = [o.reshape(r.shape) for o, r in zip(in_oracle(flat, parameters, [{}] * 2, True), results)]
    found = exact(outputs, leaves_of(flat, parameters))
    found[3] = accuracy.Exact(found[3].value.reshape(x.shape))
    assert_close(results, found)


# One rounding in every type

KINDS = [  # dtype of x, of the parameters, n, gamma, norm
    (bf16, fp32, 4, True, True),
    (bf16, bf16, 3, False, False),
    (fp16, fp32, 4, False, True),
    (fp16, fp32, 1, True, True),
    (fp32, bf16, 5, True, False),
    (fp32, fp64, 2, False, True),
]


@by_options
@pytest.mark.parametrize(("dtype", "parameter_dtype", "n", "gamma", "norm"), KINDS, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_types(dtype, parameter_dtype, n, gamma, norm, scale, options):
    """x, what it is read with, h_out and all parameters: outputs and gradients are rounded once."""
    x, (own,) = sublayers([options], (40,), n, 33, dtype, gamma, norm, scale, parameter_dtype)
    generator = torch.Generator().manual_seed(cases.SEED + 5)
    read = torch.sigmoid(torch.randn(40, n, generator=generator)).requires_grad_()
    h_out = (scale * torch.randn(40, 33, generator=generator)).to(dtype).requires_grad_()
    outputs = sublayer(x, read, h_out, own, options)
    assert [output.dtype for output in outputs] == [dtype, dtype, fp32]
    results = gradients(outputs, leaves_of(x, [own], read, h_out))
    wide, (double,) = in_doubles(x, [own])
    of_read, of_h_out = (t.detach().double().requires_grad_() for t in (read, h_out))
    scaled = []
    expected = sublayer_in_oracle(wide, of_read, of_h_out, double, options, scaled)
    found = exact(expected, leaves_of(wide, [double], of_read, of_h_out), scaled, [o.dtype for o in outputs])
    assert_close([r.float() if r.dtype == fp64 else r for r in results], found)  # of an fp64 parameter: fp32 sums


@both_forms
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32])
def test_bits_of_a_loop(dtype, shifted):
    """The boundary in one call has the bits of its parts, with and without gradients; the same each time."""
    for options in OPTIONS.values():
        x, parameters = sublayers([options] * 3, (5,), 3, D, dtype)
        outputs = in_a_loop(x, parameters, [options] * 3, shifted)
        assert_equal(in_a_loop(x, parameters, [options] * 3, shifted), outputs)
        with torch.no_grad():
            assert_equal(in_a_loop(x, parameters, [options] * 3, shifted), outputs)
            assert_equal(by_parts(x, parameters, options, shifted), outputs)


@by_options
def test_functions_take_them(options):
    """mhc_pre, mhc_post, mhc_post_pre, mhc_layer: one sublayer, its boundary, and all in one."""
    x, parameters = sublayers([options] * 2, (T,), 3, D, fp64)
    of_post = {"transposed": options.get("transposed", False)}
    leaves = leaves_of(x, parameters)
    h_in, h_post, h_res = mhc_ops.mhc_pre(x, **parameters[0], **options)
    assert (h_res is None) == (options.get("residual") == "identity")
    x_next = mhc_ops.mhc_post(x, layer(h_in), h_post, h_res, **of_post)
    h_in, h_post, h_res = mhc_ops.mhc_pre(x_next, **parameters[1], **options)
    apart = mhc_ops.mhc_post(x_next, layer(h_in), h_post, h_res, **of_post)
    h_in, h_post, h_res = mhc_ops.mhc_pre(x, **parameters[0], **options)
    x_next, h_in, *maps = mhc_ops.mhc_post_pre(x, layer(h_in), h_post, h_res, **parameters[1], **options)
    fused = mhc_ops.mhc_post(x_next, layer(h_in), *maps, **of_post)
    layers = mhc_ops.mhc_layer(x, layer, **parameters[0], **options)
    layers = mhc_ops.mhc_layer(layers, layer, **parameters[1], **options)
    expected = exact(in_oracle(x, parameters, [options] * 2), leaves)
    for out in (apart, fused, layers):
        assert_close(gradients([out], leaves), expected)


def test_logits():
    """h_res is what Sinkhorn would have got; the rest is that of mhc_pre."""
    x, (own,) = sublayers([{}], (T,), 3, D, fp64)
    h_in, h_post, logits = mhc_ops.mhc_pre(x, **own, residual="logits")
    expected = mhc_ops.mhc_pre(x, **own)
    assert_equal([h_in, h_post, mhc_ops.sinkhorn(logits)], expected)
    del own["layer_norm_weight"]
    _, *forward_pre = mhc_ops.mhc_forward_pre(x, **own)
    assert_equal([h_post, logits], forward_pre)
    assert_equal(mhc_ops.mhc_maps(x, **own, residual="logits")[1:], forward_pre)


def test_sinkhorn_without_eps():
    """Megatron's main, TransformerEngine and fla: exp, then rows and columns in turn, in the logarithm here."""
    logits = 3 * torch.randn(20, 4, 4, dtype=fp64, generator=torch.Generator().manual_seed(cases.SEED))
    z = logits
    for _ in range(20):
        z = z - z.logsumexp(-1, keepdim=True)
        z = z - z.logsumexp(-2, keepdim=True)
    assert accuracy.close(mhc_ops.sinkhorn(logits, eps=0), z.exp())
    assert accuracy.close(mhc_ops.sinkhorn(logits.float(), eps=0), mhc_ops.sinkhorn(logits.float().double(), eps=0))


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
@pytest.mark.parametrize(("outer", "n"), [((40,), 3), ((1,), 1), ((0,), 4), ((2, 3), 8)], ids=str)
def test_mean(outer, n, dtype):
    x = cases.Case(cases.MHC_PRE, outer, n, 33, fp32).inputs()["x"].to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out, expected = mhc_ops.mhc_mean(x), shifted_oracle.mean(wide.reshape(-1, n, 33)).reshape(*outer, 33)
    assert out.dtype == dtype
    assert_close(gradients([out], [x]), exact([expected], [wide], dtypes=[dtype]))
    with torch.autocast("cpu", bf16):
        assert torch.equal(mhc_ops.mhc_mean(x), out)


# Derivatives of every order


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


def test_the_gradient_of_p_is_one_boundary_earlier():
    """Of the two h_pre, the first reads x between the sublayers, and the second nothing but the end."""
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


def test_a_carry_used_twice():
    """Two ways on from one carry."""
    x, parameters = sublayers([{}] * 2, (T,), 3, D, fp64)
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], shifted=True)
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1])
    out = [*mhc_ops.mhc_leave(after, layer(h_next)), *mhc_ops.mhc_leave(carry, layer(h_in))]
    expected = [*in_oracle(x, parameters, [{}] * 2, True)[:2], *in_oracle(x, parameters[:1], [{}], True)[:2]]
    leaves = leaves_of(x, parameters)
    assert_close(gradients(out, leaves), exact(expected, leaves))


def test_a_carry_made_without_gradients():
    x, parameters = sublayers([{}] * 2, (T,), 3, D, fp64)
    with torch.no_grad():
        h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], shifted=True)
    assert carry.link is None
    h_next, after = mhc_ops.mhc_next(carry, layer(h_in), **parameters[1])
    out, p = mhc_ops.mhc_leave(after, layer(h_next))
    assert_close([out, p], [accuracy.Exact(e.detach()) for e in in_oracle(x, parameters, [{}] * 2, True)[:2]])
    assert torch.autograd.grad(out.sum(), x)[0].abs().max() > 0


# The modules


def connections(depth=3, n=3, **options):
    """Random maps, so that streams differ and every row of phi matters."""
    torch.manual_seed(cases.SEED)
    made = [HyperConnection(nn.Sequential(nn.Linear(D, D), nn.Tanh()), n, D, **options) for _ in range(depth)]
    for connection in made:
        with torch.no_grad():
            connection.phi.normal_(std=0.3)
            connection.alpha.fill_(1.1)
    return made


def streams(n=3, dtype=fp64):
    return torch.randn(T, n, D, dtype=dtype, generator=torch.Generator().manual_seed(cases.SEED)).requires_grad_()


def parameters_of(connection):
    names = ("phi", "alpha", "bias", "gamma", "layer_norm_weight")
    return {name: getattr(connection, name) for name in names if getattr(connection, name) is not None}


@both_forms
@by_options
def test_stack(options, shifted):
    made = [c.double() for c in connections(gamma=True, layer_norm=True, **options)]
    stack, x = HyperStack(*made, shifted=shifted), streams()
    parameters = [parameters_of(connection) for connection in made]
    out = shifted_oracle.stack(x, [c.layer for c in made], parameters, [options] * 3, shifted=shifted)
    expected = shifted_oracle.contract(*out) if shifted else out
    leaves = [x, *stack.parameters()]
    assert_close(gradients([stack(x)], leaves), exact([expected], leaves))
    assert_equal(gradients([stack(x)], leaves), gradients([HyperStack(*made, shifted=shifted, recompute=2)(x)], leaves))
    if not shifted:
        assert_close(gradients([nn.Sequential(*made)(x)], leaves), exact([expected], leaves))


@by_options
def test_x_is_made_again_as_it_was_written(options):
    """What recompute does in the backward of kernels."""
    x, (own,) = sublayers([options], (T,), 3, D, bf16)
    h_in, carry = mhc_ops.mhc_enter(x, **own, **options)
    remade = recompute.Remade(x.detach(), carry, h_in, "reference")
    assert torch.equal(remade.x(), mhc_ops.mhc_leave(carry, h_in))


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=str)
def test_stages_of_a_pipeline(options):
    made = connections(4, norm_eps=1e-20, **options)
    whole, x = HyperStack(*made, shifted=True), streams(dtype=fp32)
    leaves = [x, *whole.parameters()]
    expected = gradients([whole(x)], leaves)
    for cut in range(1, 4):
        assert_equal(gradients([whole[cut:](whole[:cut](x))], leaves), expected)
        assert_equal(gradients([whole[cut:](*whole[:cut](x))], leaves), expected)
    first = HyperStack(*made[:1], shifted=True, last=False)
    middle = HyperStack(*made[1:3], shifted=True, first=False, last=False)
    last = HyperStack(made[3], shifted=True, first=False)
    assert_equal(gradients([last(middle(first(x)))], leaves), expected)
    x_next, p = middle(first(x))
    assert (x_next.shape, p.shape, p.dtype) == ((T, 3, D), (T, 3), fp32)
    assert torch.equal((first + middle + last)(x), whole(x))
    assert [(s.first, s.last) for s in (whole[:2], whole[1:], whole[1:3], whole[:], middle * 2)] == [
        (True, False), (False, True), (False, False), (True, True), (False, False)]  # fmt: skip


@pytest.mark.parametrize("dtype", [bf16, fp32, fp64])
def test_a_stack_of_nothing(dtype):
    x = streams(dtype=dtype)
    assert torch.equal(HyperStack(shifted=True)(x), x[:, 0])
    same, p = HyperStack(shifted=True, last=False)(x)
    assert same is x
    assert p.tolist() == [[1.0, 0, 0]] * T
    assert p.dtype == (fp64 if dtype == fp64 else fp32)
    assert torch.equal(HyperStack(shifted=True, first=False)(x, p.roll(1, -1)), x[:, 1])


def test_extras_and_rests_of_stages():
    def several(h, scale, *, shift):
        return h * scale + shift, "cache"

    made = [HyperConnection(several, 3, D) for _ in range(2)]
    whole, x = HyperStack(*made, shifted=True), streams(dtype=fp32)
    out, rests = whole(x, 2.0, shift=1.0)
    assert rests == [("cache",), ("cache",)]
    pair, rests = whole[:1](x, 2.0, shift=1.0)
    assert rests == [("cache",)]
    assert torch.equal(whole[1:](pair, 2.0, shift=1.0)[0], out)
    assert torch.equal(whole[1:](*pair, 2.0, shift=1.0)[0], out)


def test_hooks_see_the_carry():
    whole, x = HyperStack(*connections(2), shifted=True), streams(dtype=fp32)
    seen = []
    whole[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    whole[1].register_full_backward_hook(lambda module, dinputs, doutputs: None)
    whole(x).sum().backward()
    assert seen[0].read.shape == (T, 3)
    assert seen[0].x is x or torch.equal(seen[0].x, x)
    assert x.grad.abs().max() > 0


def test_compile():
    torch.compiler.reset()
    whole, x = HyperStack(*connections(2), shifted=True), streams(dtype=fp32)
    compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves = [x, *whole.parameters()]
    expected = [r.double() for r in gradients([whole(x)], leaves)]
    assert_close(gradients([compiled(x)], leaves), expected)


def test_autocast_and_inference_mode():
    whole, x = HyperStack(*connections(2), shifted=True), streams(dtype=fp32)
    with torch.autocast("cpu", bf16):
        assert whole(x).dtype == fp32
    with torch.inference_mode():
        assert torch.equal(whole(x.detach()), whole(x))


def test_a_fresh_shifted_model_is_a_residual_network():
    layers = [nn.Linear(D, D) for _ in range(3)]
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(cases.SEED))
    for options in ({}, {"residual": "identity"}, {"residual": "identity", "post_eps": 0.25}, {"transposed": True}):
        made = HyperStack(*(HyperConnection(inner, 4, D, norm_eps=1e-20, **options) for inner in layers), shifted=True)
        expected = x
        for inner in layers:
            expected = expected + inner(expected)
        # h_pre is a sigmoid in fp32 + 1e-6 from a logit, and the columns of h_res sum to 1 up to eps
        assert torch.allclose(made(mhc_ops.mhc_expand(x, 4)), expected, rtol=1e-4, atol=1e-4)


def test_state():
    """Keys as ever; the identity has no rows for a map that it does not have."""
    made = connections(2, n=4, residual="identity", post_eps=1e-6, layer_norm=True, gamma=True)
    stack = HyperStack(*made, shifted=True)
    own = ("phi", "alpha", "bias", "gamma", "layer_norm_weight", "layer.0.weight", "layer.0.bias")
    assert list(stack.state_dict()) == [f"{i}.{name}" for i in range(2) for name in own]
    assert [tuple(t.shape) for t in list(stack.state_dict().values())[:3]] == [(8, 4 * D), (2,), (8,)]
    other = copy.deepcopy(stack)
    other[0].reset_parameters()
    other.load_state_dict(stack.state_dict())
    x = streams(4, fp32)
    assert torch.equal(other(x), stack(x))
    standard = HyperStack(*connections(2))
    assert list(HyperStack(*connections(2), shifted=True).state_dict()) == list(standard.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.phi"):
        standard.load_state_dict(stack.state_dict(), strict=False)


def test_repr():
    stack = HyperStack(*connections(1, residual="identity"), shifted=True, first=False, recompute=2)
    assert "recompute=2, shifted=True, first=False" in repr(stack)
    assert "n=3, D=7, residual='identity'" in repr(stack)
    assert "transposed=True" in repr(connections(1, transposed=True)[0])


# What is refused


def test_combinations_without_meaning():
    one = HyperConnection(nn.Identity(), 2, 8)
    bad = [
        (lambda: HyperStack(one, first=False), ValueError,
         "HyperStack: first=False has no meaning without shifted=True"),
        (lambda: HyperStack(one, last=False), ValueError,
         "HyperStack: last=False has no meaning without shifted=True"),
        (lambda: HyperStack(one, shifted=1), TypeError, "HyperStack: shifted must be a bool, got int"),
        (lambda: HyperStack(one) + HyperStack(one, shifted=True), ValueError,
         "HyperStack: a shifted stack and one that is not make no stack"),
        (lambda: HyperStack(one, shifted=True, first=False)(torch.zeros(3, 2, 8)), TypeError,
         r"HyperStack: with first=False the input must be \(x, p\), got Tensor"),
        (lambda: HyperStack(one, shifted=True, first=False)(torch.zeros(3, 2, 8), torch.zeros(3, 4)), ValueError,
         r"mhc_enter: read must be \[3, 2\], got \[3, 4\]"),
        (lambda: HyperConnection(nn.Identity(), 2, 8, residual="logits"), ValueError,
         "HyperConnection: residual='logits' is no map to mix streams with; MHCBlock returns it"),
        (lambda: HyperConnection(nn.Identity(), 2, 8, residual="identity", transposed=True), ValueError,
         "HyperConnection: transposed=True has no meaning with residual='identity'"),
        (lambda: HyperConnection(nn.Identity(), 2, 8, post_eps=1.0), ValueError,
         "HyperConnection: post_eps must be below 1, got 1.0"),
    ]  # fmt: skip
    for call, error, message in bad:
        with pytest.raises(error, match=f"^{message}$"):
            call()


def test_read_is_checked():
    x, (own,) = sublayers([{}], (T,), 3, D, fp32)
    with pytest.raises(ValueError, match=r"^mhc_enter: read has no meaning without shifted=True$"):
        mhc_ops.mhc_enter(x, **own, read=torch.zeros(T, 3))
    with pytest.raises(ValueError, match=r"^mhc_enter: read must be \[5, 3\], got \[3\]$"):
        mhc_ops.mhc_enter(x, **own, shifted=True, read=torch.zeros(3))
    with pytest.raises(TypeError, match=r"^mhc_enter: read must be a torch.Tensor, got float$"):
        mhc_ops.mhc_enter(x, **own, shifted=True, read=1.0)
    with pytest.raises(TypeError, match=r"^mhc_enter: shifted must be a bool, got str$"):
        mhc_ops.mhc_enter(x, **own, shifted="yes")
    with pytest.raises(TypeError, match=r"^mhc_mean: x must be a torch.Tensor, got NoneType$"):
        mhc_ops.mhc_mean(None)
    with pytest.raises(ValueError, match=r"^mhc_mean: x must be \[..., n, D\] with n and D at least 1, got \[7\]$"):
        mhc_ops.mhc_mean(torch.zeros(7))


@pytest.mark.parametrize(
    ("name", "value"), [("post_eps", 0.5), ("residual", "identity"), ("transposed", True)], ids=str
)
def test_tilelang_refuses_options(name, value):
    """By one sentence; nothing runs on another backend instead."""
    assert name in NOT_IN_TILELANG
    options, words = DEFAULTS._replace(**{name: value}), f"{name}={value!r}"
    message = f"^mhc_pre with {words}: backend 'tilelang' does not have it, 'triton' and 'reference' do$"
    with pytest.raises(NotImplementedError, match=message):
        prepare.check_kernel_options("mhc_pre", options, "tilelang")
    prepare.check_kernel_options("mhc_pre", options, "triton")


def test_tilelang_refuses_the_residual():
    for h_res, transposed, words in ((None, False, "without h_res"), (torch.ones(1), True, "with transposed=True")):
        with pytest.raises(NotImplementedError, match=f"^mhc_post {words}: backend 'tilelang' does not have it"):
            prepare.check_kernel_residual("mhc_post", h_res, transposed, "tilelang")
