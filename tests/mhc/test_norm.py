"""The layer's norm, the maps and the read alone, and one boundary: exact in every kernel, for any outputs and sizes."""

from itertools import cycle

import pytest
import stack_oracle
import torch
from mhc_kernels import bf16, cotangents_of, fp16, fp32, leave_out

import mhc_ops
from mhc_ops.mhc import prepare
from mhc_ops.testing import accuracy, cases

by_stack_subject = pytest.mark.parametrize("subject", cases.OF_THE_STACK, ids=lambda subject: subject.name)
by_normed = pytest.mark.parametrize("subject", cases.NORMED, ids=lambda subject: subject.name)


TYPES = (bf16, fp16, fp32)
ON_A_CPU = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("triton", "cpu"), marks=pytest.mark.interpreted, id="interpreted"),
]
ON_A_GPU = pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="triton")


@pytest.fixture(params=[*ON_A_CPU, ON_A_GPU])
def place(request):
    """A backend, and a device where it runs."""
    if request.param[0] == "triton":
        pytest.importorskip("triton")
    return request.param


# Where a GPU has cases of its own, as each of them is compiled.
on_a_cpu = pytest.mark.parametrize("place", ON_A_CPU, indirect=True)


def failures(case, place):
    rows = accuracy.measure(case, *place)
    return [(row.output, row.relative_error) for row in rows if not row.passed]


# Every op with every n, an odd number of channels; types and gamma in turn, so that each n meets each in some op.
EVERY_N = [
    cases.Case(subject, (5,), n, 33, TYPES[(n + turn) % 3], gamma=(n + turn) % 2 == 0)
    for turn, subject in enumerate(cases.OF_THE_STACK)
    for n in range(1, 9)
]


def special(subject):
    """One token, no dimension of tokens, more than 64, many channels; other scales, parameters and logits."""
    return [
        cases.Case(subject, (1,), 4, 96, bf16, parameter_dtype=bf16),
        cases.Case(subject, (), 3, 20, fp32, gamma=False),
        cases.Case(subject, (2, 35), 4, 20, bf16, gamma=False, scale=1e3),
        cases.Case(subject, (3,), 2, 1100, bf16, scale=1e-3),
        *(cases.Case(subject, (9,), 4, 24, fp32, sigma=sigma) for sigma in (3, 8) if subject is not cases.MHC_READ),
    ]


@on_a_cpu
@pytest.mark.parametrize("case", EVERY_N, ids=str)
def test_exact_for_every_n(case, place, poisoned):
    assert failures(case, place) == []


@pytest.mark.parametrize("case", [case for subject in cases.OF_THE_STACK for case in special(subject)], ids=str)
def test_exact(case, place, poisoned):
    assert failures(case, place) == []


@by_stack_subject
def test_any_of_the_outputs_may_be_unused(subject, place, poisoned):
    """n and type in turn."""
    kinds = cycle([(1, fp16), (4, bf16), (8, fp32), (3, bf16), (4, fp32)])
    drawn = [cases.Case(subject, (3,), n, 12, dtype, unused=out) for (n, dtype), out in zip(kinds, leave_out(subject))]
    found = [(str(case), failures(case, place)) for case in drawn]
    assert [(case, wrong) for case, wrong in found if wrong] == []


# Sizes that only a GPU gets through.
LARGE = [
    *(
        cases.Case(subject, *(((700,), n, 512) if (n + turn) % 2 else ((300,), n, 257)), TYPES[(n + turn) % 3])
        for turn, subject in enumerate(cases.OF_THE_STACK)
        for n in range(1, 9)
    ),
    *(cases.Case(subject, (2048,), 4, D, bf16) for subject in cases.NORMED for D in (2560, 4096, 7168, 12288)),
    *(cases.Case(subject, (2048,), 4, 7168, bf16) for subject in (cases.MHC_MAPS, cases.MHC_READ, cases.MHC_NEXT)),
]


def assert_same_bits_twice(case, backend, device):
    first, second = (accuracy.run_case(case, backend, device).results for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_exact_and_same_bits_twice(case, poisoned):
    assert failures(case, ("triton", "cuda")) == []
    assert_same_bits_twice(case, "triton", "cuda")


@on_a_cpu
@by_stack_subject
def test_same_bits_twice(subject, place):
    assert_same_bits_twice(cases.Case(subject, (9,), 4, 40, bf16), *place)


@pytest.mark.parametrize(
    ("subject", "gamma"),
    [(subject, turn % 2 == 0) for turn, subject in enumerate(cases.OF_THE_STACK)],
    ids=lambda value: getattr(value, "name", None),
)
def test_empty_batch(subject, gamma, place, poisoned):
    backend, device = place
    tensors = cases.Case(subject, (2, 0), 4, 32, bf16, gamma=gamma).inputs(device)
    results = accuracy.run(subject, tensors, backend, cotangents_of(subject, tensors, backend))
    assert all(results[name].shape[:2] == (2, 0) for name in subject.outputs)
    assert all(results[f"d{name}"].shape == tensor.shape for name, tensor in tensors.items())
    parameters = [name for name in tensors if name in ("phi", "alpha", "bias", "gamma", "layer_norm_weight")]
    assert all(not results[f"d{name}"].any() for name in parameters)


@by_normed
def test_equal_streams(subject, place):
    """As mhc_expand makes them: the gradient of h_pre, and all behind it, is the rest of terms that cancel."""
    backend, device = place
    case = cases.Case(subject, (6,), 4, 40, fp32)
    tensors = case.inputs(device)
    tensors["x"] = mhc_ops.mhc_expand(tensors["x"][:, 0], 4)
    if "h_res" in tensors:  # what is read is x_next
        tensors["h_res"] = torch.full_like(tensors["h_res"], 0.25)
        tensors["h_post"] = torch.ones_like(tensors["h_post"])
    cotangents = cotangents_of(subject, tensors, backend)
    results = accuracy.run(subject, tensors, backend, cotangents)
    exact = accuracy.truth(subject, tensors, cotangents, results)
    assert [name for name in exact if not accuracy.close(results[name], exact[name])] == []


def test_token_is_the_same_in_any_batch(place):
    """With the norm too, whose sum is over whole rows."""
    backend, device = place
    if backend == "reference":
        pytest.skip("the reference promises the same bits for the same call only")
    tensors = cases.Case(cases.MHC_PRE_NORMED, (150,), 4, 300, bf16).inputs(device)
    x = tensors.pop("x")
    whole = mhc_ops.mhc_pre(x, **tensors, backend=backend)
    for rows in (slice(0, 1), slice(3, 10), slice(5, 133)):
        part = mhc_ops.mhc_pre(x[rows], **tensors, backend=backend)
        assert all(torch.equal(p, w[rows]) for p, w in zip(part, whole))


def test_strided_inputs(place):
    """Bit for bit in kernels; for the reference torch may choose others of its own."""
    backend, device = place
    tensors = cases.Case(cases.MHC_PRE_NORMED, (6,), 3, 20, bf16).inputs(device)
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}
    expected, results = (mhc_ops.mhc_pre(**given, backend=backend) for given in (tensors, strided))
    x, h_pre = cases.Case(cases.MHC_READ, (6,), 3, 20, bf16).inputs(device).values()
    read, read_strided = (mhc_ops.mhc_read(given, h_pre, backend=backend) for given in (x, x.mT.contiguous().mT))
    for one, other in zip((*expected, read), (*results, read_strided), strict=True):
        assert accuracy.close(other, one.double()) if backend == "reference" else torch.equal(other, one)


def test_pre_is_maps_and_read(place):
    backend, device = place
    tensors = cases.Case(cases.MHC_PRE, (9,), 4, 40, bf16).inputs(device)
    h_in, h_post, h_res = mhc_ops.mhc_pre(**tensors, backend=backend)
    h_pre, *maps = mhc_ops.mhc_maps(**tensors, backend=backend)
    assert torch.equal(maps[0], h_post)
    assert torch.equal(maps[1], h_res)
    assert accuracy.close(mhc_ops.mhc_read(tensors["x"], h_pre, backend=backend), h_in.double())


@pytest.mark.parametrize(("n", "gamma"), [(1, True), (2, False), (3, True)])
def test_plain_loops(n, gamma, place):
    """The maps, h_in and the norm, forward and backward, against loops that know nothing of the reference."""
    backend, device = place
    case = cases.Case(cases.MHC_PRE_NORMED, (2,), n, 5, fp32, gamma=gamma)
    tensors = case.inputs(device)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    own = [leaves.get(name) for name in ("phi", "alpha", "bias", "gamma")]
    rows = []
    for token in leaves["x"]:
        h_pre, h_post, h_res = stack_oracle.maps(list(token), *own)
        h_in = stack_oracle.read(list(token), h_pre, leaves["layer_norm_weight"])
        rows.append((h_in, torch.stack(h_post), torch.stack([torch.stack(row) for row in h_res])))
    expected = [torch.stack(column) for column in zip(*rows)]
    cotangents = cotangents_of(case.subject, tensors, backend)
    results = accuracy.run(case.subject, tensors, backend, cotangents)
    outputs = dict(zip(case.subject.outputs, expected))
    gradients = torch.autograd.grad(expected, list(leaves.values()), [c.double() for c in cotangents])
    # The terms of a gradient come from the truth that the other tests are held to; its value from the loops.
    terms = accuracy.truth(case.subject, tensors, cotangents, results)
    wanted = {name: accuracy.Exact(value.detach()) for name, value in outputs.items()}
    wanted |= {f"d{name}": accuracy.Exact(g, terms[f"d{name}"].terms) for name, g in zip(leaves, gradients)}
    assert [name for name in wanted if not accuracy.close(results[name], wanted[name])] == []


@pytest.mark.parametrize("subject", [*cases.NORMED[:3], cases.MHC_MAPS, cases.MHC_READ], ids=lambda s: s.name)
def test_gradcheck(subject):
    tensors = {name: t.double().requires_grad_() for name, t in cases.Case(subject, (2,), 3, 4).inputs().items()}

    def call(*values):
        return subject.call(**dict(zip(tensors, values)), backend="reference")

    assert torch.autograd.gradcheck(call, list(tensors.values()))


def test_layer_norm_eps(place):
    backend, device = place
    tensors = cases.Case(cases.MHC_PRE_NORMED, (4,), 3, 20, fp32, scale=1e-2).inputs(device)
    h_in = mhc_ops.mhc_pre(**tensors, layer_norm_eps=1e-2, backend=backend)[0]
    weight = tensors.pop("layer_norm_weight").double()
    plain = mhc_ops.mhc_pre(**{name: t.double() for name, t in tensors.items()}, backend="reference")[0]
    expected = torch.nn.functional.rms_norm(plain, (20,), weight, 1e-2)
    assert accuracy.close(h_in, expected)


NOT_A_WEIGHT = [
    (torch.ones(3), ValueError, r"layer_norm_weight must be \[16\], got \[3\]"),
    (torch.ones(16, device="meta"), ValueError, "layer_norm_weight must be on cpu as x is, got meta"),
    (torch.ones(16, dtype=torch.int32), TypeError, "layer_norm_weight must be bfloat16, float16, float32 or float64"),
    (1.0, TypeError, "layer_norm_weight must be a torch.Tensor, got float"),
]


@pytest.mark.parametrize(("weight", "error", "message"), NOT_A_WEIGHT, ids=[bad[2] for bad in NOT_A_WEIGHT])
def test_weights_are_checked(weight, error, message):
    tensors = cases.Case(cases.MHC_PRE, (2,), 4, 16, fp32).inputs()
    x, h_out = tensors.pop("x"), torch.zeros(2, 16)
    post = (h_out, torch.zeros(2, 4), torch.zeros(2, 4, 4))
    _, carry = mhc_ops.mhc_enter(x, **tensors)
    calls = {
        "mhc_pre": (x,),
        "mhc_post_pre": (x, *post),
        "mhc_layer": (x, torch.tanh),
        "mhc_enter": (x,),
        "mhc_next": (carry, h_out),
    }
    for name, arguments in calls.items():
        with pytest.raises(error, match=f"^{name}: {message}"):
            getattr(mhc_ops, name)(*arguments, **tensors, layer_norm_weight=weight)


def test_read_is_checked():
    with pytest.raises(ValueError, match=r"^mhc_read: h_pre must be \[2, 4\], got \[2, 3\]$"):
        mhc_ops.mhc_read(torch.zeros(2, 4, 16), torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"^mhc_read: h_pre must be a torch.Tensor, got NoneType$"):
        mhc_ops.mhc_read(torch.zeros(2, 4, 16), None)


def test_tilelang_says_what_it_lacks():
    message = r"^mhc_pre with layer_norm_weight: backend 'tilelang' does not have it, 'triton' and 'reference' do$"
    with pytest.raises(NotImplementedError, match=message):
        prepare.check_kernels("mhc_pre", torch.zeros(2, 4, 16), torch.ones(16), "tilelang")
    prepare.check_kernels("mhc_pre", torch.zeros(2, 4, 16), None, "tilelang")
