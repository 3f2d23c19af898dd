"""Every mHC op in every kernel backend: exact, for any layout, type and value of its inputs."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from mhc_kernels import STREAMED, bf16, by_any_subject, by_subject, cotangents_of, fp16, fp32, leave_out, needs, on_gpu

import mhc_ops
from mhc_ops.testing import accuracy, cases


def accuracy_cases(subject):
    """triton/test_pre.py has more of mhc_forward_pre, whose kernels the others share."""
    return [
        cases.Case(subject, (37,), 1, 40, bf16),
        cases.Case(subject, (37,), 3, 96, fp32),
        cases.Case(subject, (37,), 4, 96, bf16),
        cases.Case(subject, (5, 3), 4, 7, fp16),
        cases.Case(subject, (19,), 8, 33, bf16),
        cases.Case(subject, (21,), 2, 64, bf16, parameter_dtype=bf16),
        cases.Case(subject, (), 4, 33, bf16, gamma=False),
        *(cases.Case(subject, (19,), 4, 70, bf16, scale=scale) for scale in (1e-3, 1e3)),
        *(cases.Case(subject, (40,), 4, 40, dtype, sigma=sigma) for sigma in (0.1, 3, 8) for dtype in (bf16, fp32)
          if subject in cases.MIXED),
    ]  # fmt: skip


SMALL = [case for subject in STREAMED[1:] for case in accuracy_cases(subject)]
SINKHORN = [
    *(cases.Case(cases.SINKHORN, (33,), n, 0, dtype) for n in range(1, 9) for dtype in (fp32, bf16)),
    *(cases.Case(cases.SINKHORN, (65,), n, 0, fp32, sigma=sigma) for sigma in (0.1, 1, 3, 8) for n in (3, 4)),
]


# Sizes that only a GPU gets through: many slices and groups of K, full grids, every config with aligned and odd D.
LARGE = [
    *(
        cases.Case(subject, (1500,), n, 512, dtype)
        for subject in STREAMED
        for n in range(1, 9)
        for dtype in (bf16, fp16, fp32)
    ),
    *(cases.Case(subject, (700,), n, 257, dtype) for subject in STREAMED for n in (3, 4, 8) for dtype in (bf16, fp32)),
    *(cases.Case(subject, (4096,), 4, 2560, bf16, gamma=False) for subject in STREAMED),
    *(cases.Case(subject, (2048,), 4, 4096, bf16) for subject in STREAMED),
    *(cases.Case(subject, (128,), 4, 7168, bf16) for subject in STREAMED),
    *(cases.Case(cases.SINKHORN, (5000,), n, 0, fp32) for n in range(1, 9)),
]


# TileLang's kernels take seconds each to compile: the sizes of `mhc-ops check`, those that fill a GPU, and each n above
# 4 with one type. The other tests below share few sizes.
FEWER = [
    *(case for case in cases.CHECK if case.runs_on("tilelang")),
    *(case for case in LARGE if case.D in (2560, 4096)),
    *(case for case in LARGE if case.D == 512 and case.n > 4 and case.dtype == (bf16, fp32, fp16)[case.n % 3]),
]


def assert_accurate(case, backend, device):
    rows = accuracy.measure(case, backend, device)
    assert all(row.passed for row in rows), [(r.output, r.relative_error) for r in rows if not r.passed]


@pytest.mark.parametrize("case", [*SMALL, *SINKHORN], ids=str)
def test_exact_to_one_rounding(case, kernel_device, poisoned):
    pytest.importorskip("triton")
    assert_accurate(case, "triton", kernel_device)


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", [*SMALL, *SINKHORN], ids=str)
def test_exact_at_any_seed(case, seed):
    pytest.importorskip("triton")
    assert_accurate(replace(case, seed=case.seed + seed), "triton", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "case"), [("triton", c) for c in LARGE] + [("tilelang", c) for c in FEWER], ids=str
)
def test_exact_and_same_bits_twice(backend, case, poisoned):
    needs(backend)
    assert_accurate(case, backend, "cuda")
    tensors = case.inputs("cuda")
    cotangents = cotangents_of(case.subject, tensors, backend)
    first, second = (accuracy.run(case.subject, tensors, backend, cotangents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@by_any_subject
def test_layouts(subject, place):
    """Strided inputs and cotangents give the bits of contiguous ones, and are left as they were."""
    backend, device = place
    tensors = cases.Case(subject, (6,), 3, 40, bf16).inputs(device)
    cotangents = cotangents_of(subject, tensors, backend)
    expected = accuracy.run(subject, tensors, backend, cotangents)
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}
    if "x" in strided:
        strided["x"] = tensors["x"].transpose(1, 2).contiguous().transpose(1, 2)
    before = {name: t.clone() for name, t in strided.items()}
    results = accuracy.run(subject, strided, backend, [torch.stack([c, c], -1)[..., 0] for c in cotangents])
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert all(torch.equal(strided[name], before[name]) for name in strided)


@by_any_subject
def test_expanded_cotangents(subject, place):
    """The gradient of a sum arrives with stride 0."""
    backend, device = place
    tensors = cases.Case(subject, (6,), 3, 40, fp32).inputs(device)
    outputs = accuracy.run(subject, tensors, backend)
    count = len(subject.outputs) - subject.intermediates
    expanded = [outputs[name].new_ones(()).expand_as(outputs[name]) for name in subject.outputs[:count]]
    results = accuracy.run(subject, tensors, backend, expanded)
    exact = accuracy.truth(subject, tensors, expanded, outputs)
    names = [name for name in exact if name != "dlogits"]  # the sum of a Sinkhorn matrix is constant: no gradient
    assert all(accuracy.close(results[name], exact[name]) for name in names)


def parts_of_the_outputs(subject, T, D, kinds):
    """A case for each choice of outputs that have a cotangent, at each (n, type)."""
    return [
        cases.Case(subject, (T,), n, D, dtype, unused=unused) for n, dtype in kinds for unused in leave_out(subject)
    ]


def in_turn(subject, turn):
    every = leave_out(subject)
    kinds = [SOME_KINDS[(turn + index) % len(SOME_KINDS)] for index in range(len(every))]
    return [cases.Case(subject, (3,), n, 12, dtype, unused=out) for (n, dtype), out in zip(kinds, every)]


EVERY_KIND = list(product(range(1, 9), (bf16, fp16, fp32)))
ODD_KINDS = list(product((4, 8), (bf16, fp32)))
PARTS = [case for subject in STREAMED for case in parts_of_the_outputs(subject, 70, 64, EVERY_KIND)]
ODD_PARTS = [case for subject in STREAMED for case in parts_of_the_outputs(subject, 9, 33, ODD_KINDS)]
# The interpreter takes its time: one kind for each choice of outputs, in turn, and all choices of one op at another.
SOME_KINDS = [(1, fp16), (4, bf16), (7, bf16), (8, fp32)]
SOME_PARTS = [
    *(case for turn, subject in enumerate(STREAMED) for case in in_turn(subject, turn)),
    *parts_of_the_outputs(cases.MHC_PRE, 3, 12, [(8, fp32)]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("case", [*PARTS, *ODD_PARTS], ids=str)
def test_any_of_the_outputs_may_be_unused(case, backend, poisoned):
    """Kernels leave out what has no cotangent, each config in its own way."""
    needs(backend)
    assert_accurate(case, backend, "cuda")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", list(dict.fromkeys(SOME_PARTS)), ids=str)
def test_any_of_the_outputs_may_be_unused_in_the_interpreter(case, poisoned):
    pytest.importorskip("triton")
    assert_accurate(case, "triton", "cpu")


@pytest.mark.parametrize("gamma", [False, True])
@by_any_subject
def test_empty_batch(subject, gamma, place, poisoned):
    backend, device = place
    tensors = cases.Case(subject, (2, 0), 4, 32, bf16, gamma=gamma).inputs(device)
    results = accuracy.run(subject, tensors, backend, cotangents_of(subject, tensors, backend))
    assert all(results[name].shape[:2] == (2, 0) for name in subject.outputs)
    assert all(results[f"d{name}"].shape == tensor.shape for name, tensor in tensors.items())
    parameters = [name for name in tensors if name in ("phi", "alpha", "bias", "gamma")]
    assert all(not results[f"d{name}"].any() for name in parameters)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@by_subject
def test_bad_values_stay_in_their_token(subject, value, place):
    backend, device = place
    tensors = cases.Case(subject, (8,), 3, 40, bf16).inputs(device)
    clean = accuracy.run(subject, tensors, backend)
    tensors["x"][5, 1, 7] = value
    outputs = accuracy.run(subject, tensors, backend)
    others = [0, 1, 2, 3, 4, 6, 7]
    count = len(subject.outputs) - subject.intermediates
    for name in subject.outputs[:count]:
        assert torch.equal(outputs[name][others], clean[name][others])
        assert not outputs[name][5].isfinite().all()
    cotangents = [torch.ones_like(outputs[name]) for name in subject.outputs[:count]]
    dx = accuracy.run(subject, tensors, backend, cotangents)["dx"]
    assert dx[others].isfinite().all()
    if subject is not cases.MHC_POST:  # whose dx does not depend on x
        assert not dx[5].isfinite().all()


class Dropped(torch.autograd.Function):
    """The identity, whose gradient is None."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, cotangent):
        return None


@by_any_subject
def test_no_cotangent_at_all(subject, place):
    backend, device = place
    tensors = cases.Case(subject, (3,), 3, 40, fp32).inputs(device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    count = len(subject.outputs) - subject.intermediates
    outputs = subject.call(**leaves, backend=backend)[:count]
    sum(Dropped.apply(output).sum() for output in outputs).backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves.values())


@by_any_subject
def test_double_backward_raises(subject, place):
    backend, device = place
    tensors = cases.Case(subject, (3,), 3, 40, fp32).inputs(device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    first = subject.call(**leaves, backend=backend)[0]
    gradient, *_ = torch.autograd.grad(first.square().sum(), next(iter(leaves.values())), create_graph=True)
    for second in (lambda loss: loss.backward(), lambda loss: torch.autograd.grad(loss, list(leaves.values()))):
        with pytest.raises(NotImplementedError, match=r"_bwd: a second derivative works with backend='refe"):
            second(gradient.sum())


@on_gpu
@by_any_subject
def test_cuda_graph(subject, backend):
    """Forward and backward, captured and replayed on new values."""
    needs(backend)
    tensors = cases.Case(subject, (64,), 4, 256, bf16).inputs("cuda")
    cotangents = cotangents_of(subject, tensors, backend)

    def step():
        return accuracy.run(subject, tensors, backend, cotangents)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    first = next(iter(tensors.values()))
    first.copy_(torch.randn_like(first))
    graph.replay()
    expected = step()
    assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_boundary_is_the_composition(place):
    """mhc_post_pre is mhc_post, then mhc_pre: the bits of x_next, the maps up to fp32 rounding."""
    backend, device = place
    tensors = cases.Case(cases.MHC_POST_PRE, (70,), 4, 200, bf16).inputs(device)
    x_next, h_in, h_post, h_res = mhc_ops.mhc_post_pre(**tensors, backend=backend)
    of_post = {name: tensors.pop(name) for name in cases.MHC_POST.inputs}
    assert torch.equal(x_next, mhc_ops.mhc_post(**of_post, backend=backend))
    expected = mhc_ops.mhc_pre(x_next, **tensors, backend=backend)
    for result, other in zip((h_in, h_post, h_res), expected):
        assert accuracy.close(result, other.double())


def test_layer_is_the_composition(place):
    """mhc_layer gives the bits of mhc_pre and mhc_post, with and without gradients."""
    backend, device = place
    case = cases.Case(cases.MHC_LAYER, (40,), 4, 200, bf16)
    tensors = case.inputs(device)
    h_out = tensors.pop("h_out")
    h_in, h_post, h_res = mhc_ops.mhc_pre(**tensors, backend=backend)
    x_next = mhc_ops.mhc_post(tensors["x"], h_out, h_post, h_res, backend=backend)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            results = case.subject.call(**tensors, h_out=h_out, backend=backend)
        assert torch.equal(results[0], x_next)
        assert torch.equal(results[1], h_in)


@pytest.mark.parametrize("sigma", [0.1, 1])
def test_sinkhorn_sums(sigma, place):
    """20 iterations: columns sum to 1 within 2e-6 (they come last, eps is 1e-6), rows as in fp64."""
    backend, device = place
    logits = cases.Case(cases.SINKHORN, (500,), 4, 0, fp32, sigma=sigma).inputs(device)["logits"]
    h_res = mhc_ops.sinkhorn(logits, backend=backend).double()
    exact = mhc_ops.sinkhorn(logits.double(), backend="reference")
    assert (h_res.sum(-2) - 1).abs().max() < 2e-6
    assert accuracy.close(h_res.sum(-1).float(), exact.sum(-1))


@pytest.mark.parametrize("iters", [1, 2, 7, 50])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
def test_sinkhorn_options(iters, eps, place):
    backend, device = place
    logits = cases.Case(cases.SINKHORN, (9,), 3, 0, fp32).inputs(device)["logits"].requires_grad_()
    cotangent = torch.randn(9, 3, 3, generator=torch.Generator().manual_seed(0)).to(device)
    h_res = mhc_ops.sinkhorn(logits, iters, eps, backend=backend)
    (dlogits,) = torch.autograd.grad(h_res, logits, cotangent)
    wide = logits.detach().double().requires_grad_()
    exact = mhc_ops.sinkhorn(wide, iters, eps, backend="reference")
    assert accuracy.close(h_res, exact)
    assert accuracy.close(dlogits, torch.autograd.grad(exact, wide, cotangent.double())[0])


def test_pre_options(place):
    backend, device = place
    options = {"norm_eps": 1e-2, "hc_eps": 1e-2, "post_mult": 1.3, "sinkhorn_iters": 3, "sinkhorn_eps": 1e-3}
    tensors = cases.Case(cases.MHC_PRE, (9,), 3, 40, fp32).inputs(device)

    def run(values, backend):
        leaves = {name: t.detach().requires_grad_() for name, t in values.items()}
        outputs = mhc_ops.mhc_pre(**leaves, **options, backend=backend)
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), cotangents)]

    exact = run({name: t.double() for name, t in tensors.items()}, "reference")
    assert all(accuracy.close(result, e) for result, e in zip(run(tensors, backend), exact))


def test_h_out_of_another_type(place):
    """Under autocast a layer returns bf16 beside fp32 streams."""
    backend, device = place
    tensors = cases.Case(cases.MHC_POST, (9,), 3, 40, fp32).inputs(device)
    tensors["h_out"] = tensors["h_out"].to(bf16)
    cotangents = cotangents_of(cases.MHC_POST, tensors, backend)
    results = accuracy.run(cases.MHC_POST, tensors, backend, cotangents)
    exact = accuracy.truth(cases.MHC_POST, tensors, cotangents)
    assert (results["x_next"].dtype, results["dh_out"].dtype) == (fp32, bf16)
    assert all(accuracy.close(results[name], exact[name]) for name in exact)


@on_gpu
@pytest.mark.parametrize("subject", [cases.MHC_LAYER, cases.MHC_POST_PRE], ids=lambda subject: subject.name)
def test_more_than_2_to_the_31_elements(subject, backend):
    """The last tokens of tensors past 2^31 elements have the bits they have alone, forward and in dx."""
    needs(backend)
    T, n, D = 140_000, 4, 4096
    needed = 10 * T * n * D * 2
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free GPU memory")
    tail = cases.Case(subject, (100,), n, D, gamma=False).inputs("cuda")
    per_token = [name for name in tail if name in ("x", "h_out", "h_post", "h_res")]
    whole = dict(tail)
    for name in per_token:
        whole[name] = tail[name].new_zeros((T, *tail[name].shape[1:]))
        whole[name][-100:] = tail[name]

    def run(tensors):
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        outputs = subject.call(**leaves, backend=backend)
        gradients = torch.autograd.grad(outputs, [leaves["x"], leaves["h_out"]], [torch.ones_like(o) for o in outputs])
        return [result[-100:].clone() for result in (*outputs, *gradients)]

    assert whole["x"].numel() > 2**31
    assert all(torch.equal(one, other) for one, other in zip(run(whole), run(tail)))
