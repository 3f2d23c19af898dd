"""Every mHC op in every backend: exact to one rounding, for any layout, type and value of its inputs."""

from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from mhc_kernels import MOST, STREAMED, bf16, by, cotangents_of, failures, fp16, fp32, leave_out, needs, on_gpu
from stack_results import assert_equal

import mhc_ops
from mhc_ops.testing import accuracy, cases

Pre = partial(cases.Case, cases.MHC_FORWARD_PRE)
TYPES = (bf16, fp16, fp32)
# The others share the kernels of mhc_forward_pre.
PRE = [
    *(Pre((37,), n, 96, dtype) for n in range(1, 9) for dtype in TYPES),
    *(Pre((5, 3), 4, D, bf16) for D in (1, 7, 64, 160, 257)),
    *(Pre((19,), 4, 160, dtype, scale=scale) for dtype in TYPES for scale in (1e-3, 1e3)),
    *(Pre((130,), n, 257, bf16, gamma=False) for n in (1, 3, 4)), Pre((), 4, 33, bf16), Pre((1,), 2, 700, fp32),
    Pre((70,), 4, 32, bf16, parameter_dtype=bf16), Pre((70,), 3, 32, fp32, parameter_dtype=fp16),
    Pre((70,), 3, 32, bf16, parameter_dtype=torch.float64), Pre((3,), 4, 2100, bf16),
]  # fmt: skip
SINKHORN = [cases.Case(cases.SINKHORN, (33,), n, 0, dtype) for n in range(1, 9) for dtype in (fp32, bf16)]
SINKHORN += [cases.Case(cases.SINKHORN, (65,), n, 0, fp32, sigma=s) for s in (0.1, 1, 3, 8) for n in (3, 4)]


def of_any_op(subject):
    """One token, no dimension of tokens, more than 64, few and many channels; other scales, parameters and logits."""
    return [
        cases.Case(subject, (1,), 4, 96, bf16, parameter_dtype=bf16),
        cases.Case(subject, (), 3, 20, fp32, gamma=False),
        cases.Case(subject, (5, 3), 4, 7, fp16),
        cases.Case(subject, (2, 35), 4, 20, bf16, gamma=False, scale=1e3),
        cases.Case(subject, (3,), 2, 1100, bf16, scale=1e-3),
        *(cases.Case(subject, (9,), 4, 24, fp32, sigma=sigma) for sigma in (0.1, 3, 8) if subject in cases.MIXED),
    ]


ANY = [case for subject in (*STREAMED[1:], *cases.OF_THE_STACK, *cases.VARIANTS) for case in of_any_op(subject)]
# An odd number of channels; types and gamma in turn, so that each n meets each in some op.
EVERY_N = [
    cases.Case(subject, (5,), n, 33, TYPES[(n + turn) % 3], gamma=(n + turn) % 2 == 0)
    for turn, subject in enumerate((*STREAMED[1:], *cases.OF_THE_STACK, *cases.VARIANTS))
    for n in range(1, 9)
]
ONE_SEED = [case for case in (*PRE, *ANY, *SINKHORN) if case.subject in cases.SUBJECTS]
OTHER_SEEDS = [replace(case, seed=case.seed + seed) for case in ONE_SEED for seed in (1, 2)]

# Sizes that only a GPU gets through: many slices and groups of K, full grids, every config with aligned and odd D.
LARGE = [
    *(cases.Case(subject, (1500,), n, 512, dtype) for subject in STREAMED for n in range(1, 9) for dtype in TYPES),
    *(cases.Case(subject, (700,), n, 257, dtype) for subject in STREAMED for n in (3, 4, 8) for dtype in (bf16, fp32)),
    *(cases.Case(subject, (4096,), 4, 2560, bf16, gamma=False) for subject in STREAMED),
    *(cases.Case(subject, (2048,), 4, 4096, bf16) for subject in STREAMED),
    *(cases.Case(subject, (128,), 4, 7168, bf16) for subject in STREAMED),
    *(cases.Case(cases.SINKHORN, (5000,), n, 0, fp32) for n in range(1, 9)),
]
LARGE_STACK = [
    *(cases.Case(subject, *(((700,), n, 512) if (n + turn) % 2 else ((300,), n, 257)), TYPES[(n + turn) % 3])
      for turn, subject in enumerate(cases.OF_THE_STACK) for n in range(1, 9)),
    *(cases.Case(subject, (2048,), 4, D, bf16) for subject in cases.NORMED for D in (2560, 4096, 7168, 12288)),
    *(cases.Case(subject, (2048,), 4, 7168, bf16) for subject in (cases.MHC_MAPS, cases.MHC_READ, cases.MHC_NEXT)),
    *(cases.Case(subject, (T,), 4, D, bf16) for subject in (cases.MHC_POST_PRE, cases.MHC_POST_PRE_NORMED)
      for T, D in ((1300, 7168), (4001, 1280), (16897, 256))),
]  # fmt: skip
# TileLang's kernels take seconds each to compile: the sizes of `mhc-ops check`, those that fill a GPU, and each n above
# 4 with one type. The other tests below share few sizes.
FEWER = [case for case in cases.CHECK if case.runs_on("tilelang")]
FEWER += [case for case in LARGE if case.D in (2560, 4096)]
FEWER += [case for case in LARGE if case.D == 512 and case.n > 4 and case.dtype == (bf16, fp32, fp16)[case.n % 3]]


def parts_of_the_outputs(subject, T, D, kinds):
    """A case for each choice of outputs that have a cotangent, at each (n, type)."""
    drawn = [(n, dtype, unused) for n, dtype in kinds for unused in leave_out(subject)]
    return [cases.Case(subject, (T,), n, D, dtype, unused=unused) for n, dtype, unused in drawn]


# Kernels leave out what has no cotangent, each config in its own way.
EVERY_KIND = list(product(range(1, 9), TYPES))
ODD_KINDS = list(product((4, 8), (bf16, fp32)))
PARTS = [case for subject in STREAMED for case in parts_of_the_outputs(subject, 70, 64, EVERY_KIND)]
PARTS += [case for subject in STREAMED for case in parts_of_the_outputs(subject, 9, 33, ODD_KINDS)]
ON_GPU = [*product(["triton"], LARGE + LARGE_STACK + PARTS), *product(["tilelang"], FEWER + PARTS)]


@pytest.mark.parametrize("case", [*PRE, *SINKHORN, *ANY, *EVERY_N, *OTHER_SEEDS], ids=str)
def test_exact_to_one_rounding(case, kernel_device, poisoned):
    assert failures(case, "triton", kernel_device) == []


@by(cases.ALL)
def test_the_reference_is_exact(subject):
    """The truth is its fp64."""
    drawn = [case for case in (*cases.CHECK, *ANY, *EVERY_N) if case.subject is subject]
    assert drawn and {str(case): failures(case, "reference") for case in drawn} == {str(case): [] for case in drawn}


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "case"), ON_GPU, ids=str)
def test_exact_and_same_bits_twice(backend, case, poisoned):
    needs(backend)
    assert failures(case, backend, "cuda") == []
    first, second = (accuracy.run_case(case, backend, "cuda").results for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@by(MOST)
def test_any_of_the_outputs_may_be_unused_in_turn(subject, place, poisoned):
    """n and type in turn, beginning with another one for each op; all choices of one op at one size."""
    kinds = cycle([(1, fp16), (4, bf16), (7, bf16), (8, fp32), (3, bf16), (4, fp32)])
    for _ in range(cases.ALL.index(subject)):
        next(kinds)
    drawn = [cases.Case(subject, (3,), n, 12, dtype, unused=out) for out, (n, dtype) in zip(leave_out(subject), kinds)]
    if subject is cases.MHC_PRE:
        drawn += parts_of_the_outputs(subject, 3, 12, [(8, fp32)])
    assert {str(case): failures(case, *place) for case in drawn} == {str(case): [] for case in drawn}


@by(cases.ALL)
def test_empty_batch(subject, anywhere, poisoned):
    backend, device = anywhere
    for gamma in (False, True):
        case = cases.Case(subject, (2, 0), 4, 32, bf16, gamma=gamma)
        if not case.runs_on(backend):
            continue
        tensors = case.inputs(device)
        results = accuracy.run(subject, tensors, backend, cotangents_of(subject, tensors, backend))
        assert all(results[name].shape[:2] == (2, 0) for name in subject.outputs)
        assert all(results[f"d{name}"].shape == tensor.shape for name, tensor in tensors.items())
        parameters = [name for name in tensors if name in ("phi", "alpha", "bias", "gamma", "layer_norm_weight")]
        assert all(not results[f"d{name}"].any() for name in parameters)


@by(MOST)
def test_layouts(subject, kernels):
    """Strided inputs and cotangents give the bits of contiguous ones and stay as they were; so do expanded ones."""
    backend, device = kernels
    case = cases.Case(subject, (6,), 3, 40, bf16)
    if not case.runs_on(backend):
        pytest.skip(f"{backend} does not have it")
    tensors = case.inputs(device)
    cotangents = cotangents_of(subject, tensors, backend)
    expanded = [c.new_ones(()).expand_as(c) for c in cotangents]
    of_ones = accuracy.run(subject, tensors, backend, [c.contiguous() for c in expanded])
    expected = accuracy.run(subject, tensors, backend, cotangents)
    strided = [torch.stack([c, c], -1)[..., 0] for c in cotangents]
    ways = ("strided", strided, expected), ("transposed", strided, expected), ("", expanded, of_ones)
    for layout, given, same in ways:
        laid_out = replace(case, layout=layout).inputs(device)
        before = {name: t.clone() for name, t in laid_out.items()}
        results = accuracy.run(subject, laid_out, backend, given)
        assert {name: torch.equal(results[name], same[name]) for name in same} == dict.fromkeys(same, True), layout
        assert all(torch.equal(laid_out[name], before[name]) for name in before)


def wrong(subject, tensors, backend):
    cotangents = cotangents_of(subject, tensors, backend)
    results = accuracy.run(subject, tensors, backend, cotangents)
    exact = accuracy.truth(subject, tensors, cotangents, results)
    return [name for name in exact if not accuracy.close(results[name], exact[name])]


@by(cases.NORMED)
def test_equal_streams(subject, place):
    """As mhc_expand makes them: the gradient of h_pre, and all made from it, is what is left of terms that cancel."""
    backend, device = place
    case = cases.Case(subject, (6,), 4, 40, fp32)
    tensors = case.inputs(device)
    tensors["x"] = mhc_ops.mhc_expand(tensors["x"][:, 0], 4)
    if "h_res" in tensors:  # what is read is x_next
        tensors["h_res"] = torch.full_like(tensors["h_res"], 0.25)
        tensors["h_post"] = torch.ones_like(tensors["h_post"])
    assert wrong(subject, tensors, backend) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@by(STREAMED)
def test_bad_values_stay_in_their_token(subject, value, kernels):
    backend, device = kernels
    tensors = cases.Case(subject, (8,), 3, 40, bf16).inputs(device)
    clean = accuracy.run(subject, tensors, backend)
    tensors["x"][5, 1, 7] = value
    outputs = accuracy.run(subject, tensors, backend)
    others = [0, 1, 2, 3, 4, 6, 7]
    for name in subject.differentiable:
        assert torch.equal(outputs[name][others], clean[name][others]) and not outputs[name][5].isfinite().all()
    cotangents = [torch.ones_like(outputs[name]) for name in subject.differentiable]
    dx = accuracy.run(subject, tensors, backend, cotangents)["dx"]
    assert dx[others].isfinite().all()
    if subject is not cases.MHC_POST:  # whose dx does not depend on x
        assert not dx[5].isfinite().all()


def test_no_cotangent_at_all(kernels):
    backend, device = kernels
    tensors = cases.Case(cases.MHC_POST, (3,), 3, 40, fp32).inputs(device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    drop = torch._C._functions.UndefinedGrad()  # the identity, whose gradient is None
    drop(cases.MHC_POST.call(**leaves, backend=backend)[0]).sum().backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves.values())


@by(cases.SUBJECTS)
def test_double_backward_raises(subject, kernels):
    backend, device = kernels
    tensors = cases.Case(subject, (3,), 3, 40, fp32).inputs(device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    first = subject.call(**leaves, backend=backend)[0]
    gradient, *_ = torch.autograd.grad(first.square().sum(), next(iter(leaves.values())), create_graph=True)
    for second in (lambda loss: loss.backward(), lambda loss: torch.autograd.grad(loss, list(leaves.values()))):
        with pytest.raises(NotImplementedError, match=r"_bwd: a second derivative works with backend='refe"):
            second(gradient.sum())


@on_gpu
@by(cases.SUBJECTS)
def test_cuda_graph(subject, backend):
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


def test_compositions(kernels):
    """mhc_post_pre has the bits of mhc_post and mhc_layer those of mhc_pre and mhc_post, with and without gradients."""
    backend, device = kernels
    tensors = cases.Case(cases.MHC_POST_PRE, (70,), 4, 200, bf16).inputs(device)
    of_post = {name: tensors[name] for name in cases.MHC_POST.inputs}
    x_next = mhc_ops.mhc_post(**of_post, backend=backend)
    assert torch.equal(mhc_ops.mhc_post_pre(**tensors, backend=backend)[0], x_next)
    own = {name: tensors[name] for name in cases.MHC_PRE.inputs}
    h_in, *maps = mhc_ops.mhc_pre(**own, backend=backend)
    expected = mhc_ops.mhc_post(own["x"], tensors["h_out"], *maps, backend=backend), h_in
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert_equal(cases.MHC_LAYER.call(**own, h_out=tensors["h_out"], backend=backend), expected)


def test_h_out_of_another_type(kernels):
    """Under autocast a layer returns bf16 beside fp32 streams."""
    backend, device = kernels
    tensors = cases.Case(cases.MHC_POST, (9,), 3, 40, fp32).inputs(device)
    tensors["h_out"] = tensors["h_out"].to(bf16)
    assert accuracy.run(cases.MHC_POST, tensors, backend)["x_next"].dtype == fp32
    assert wrong(cases.MHC_POST, tensors, backend) == []


@on_gpu
@by([cases.MHC_LAYER, cases.MHC_POST_PRE])
def test_more_than_2_to_the_31_elements(subject, backend):
    """The last tokens have the bits they have alone, forward and in dx; dphi is theirs, as others are 0."""
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
        of = [leaves[name] for name in ("phi", "x", "h_out")]
        dphi, *gradients = torch.autograd.grad(outputs, of, [torch.ones_like(o) for o in outputs])
        return dphi, [result[-100:].clone() for result in (*outputs, *gradients)]

    assert whole["x"].numel() > 2**31
    (dphi, results), (of_tail, expected) = run(whole), run(tail)
    assert_equal(results, expected)
    assert accuracy.close(dphi, of_tail.double())
