"""Every op on DTensors: the bits of one process forward, its gradients to rounding, and where results are placed."""

import importlib
import sys
from dataclasses import replace

import older_torch
import pytest
import torch
from one_process import assert_close
from processes import run
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import mhc_ops
from mhc_ops.core.op import Op
from mhc_ops.testing import accuracy, cases
from mhc_ops.testing.cases import Case
from mhc_ops.testing.conv_cases import CACHE, ConvCase

n, D, W = 2, 8, 3
# The dimension along which each tensor is sharded. All others are replicated.
TOKENS = dict.fromkeys(("x", "h_out", "h_pre", "h_post", "h_res", "logits"), 1)
HALVES = dict.fromkeys(TOKENS, 0)
BATCH = dict.fromkeys(("x", "residual", "seq_idx", "initial_state", "conv_state", "cache_seqlens"), 0)
CHANNELS = {"x": -1, "residual": -1, "weight": 0, "bias": 0, "initial_state": 1, "conv_state": 1}


def two_layers(x, backend, shifted=False, **of_pre):
    h_in, carry = mhc_ops.mhc_enter(x, **of_pre, shifted=shifted, backend=backend)
    h_in, carry = mhc_ops.mhc_next(carry, h_in.tanh(), **of_pre, backend=backend)
    left = mhc_ops.mhc_leave(carry, h_in.tanh(), backend=backend)
    return (mhc_ops.mhc_read(*left, backend=backend) if shifted else left,)


def of_mhc(subject, **options):
    """Only the normed subject has gamma too, so that rules without it are tested."""
    return Case(subject.with_options(**options), (2, 4), n, D, torch.float32, gamma=subject in cases.NORMED)


def of_conv(B, L, **options):
    return ConvCase(B, L, D, W, torch.float32, **options)


IN_TWO_LAYERS = replace(cases.MHC_PRE, name="two layers", call=two_layers, outputs=("out",))
OF_EXPAND = {"inputs": ("h_out",), "call": lambda h_out, backend: (mhc_ops.mhc_expand(h_out, n),)}
EXPANDED = replace(cases.MHC_MEAN, name="expand", **OF_EXPAND)
MIXED = (cases.MHC_PRE_NORMED, cases.MHC_MAPS, cases.MHC_LAYER, cases.MHC_POST_PRE, IN_TWO_LAYERS)
MHC = [  # after mhc_layer comes mhc_post, whose backward differs by a flag alone
    *((of_mhc(subject, sinkhorn_iters=2), TOKENS) for subject in MIXED),
    (of_mhc(IN_TWO_LAYERS, sinkhorn_iters=2, shifted=True), TOKENS),
    *((of_mhc(subject), TOKENS) for subject in (cases.MHC_READ, cases.MHC_POST, cases.MHC_HEAD, EXPANDED)),
    (of_mhc(cases.SINKHORN, iters=2), TOKENS),
    *((of_mhc(subject), HALVES) for subject in (cases.MHC_PRE_IDENTITY, cases.MHC_MEAN)),
]
CONV = [(of_conv(2, 6, places="states"), axis) for axis in (BATCH, CHANNELS)]
CONV += [(of_conv(2, 6, silu=False, places="seq_idx"), BATCH)]
CONV_OF_TRITON = [(of_conv(1, 6, places="cu_seqlens", residual=True), CHANNELS)]
CONV_OF_TRITON += [(of_conv(1, 6, places=CACHE), CHANNELS), (of_conv(2, 2, n=n, residual=True), BATCH)]
CONV_OF_TRITON += [(of_conv(2, 1, places=places, update=True), BATCH) for places in ("", "ring")]
CONV_OF_TRITON += [(of_conv(2, L, places=p, update=True), CHANNELS) for L, p in ((1, "slots"), (2, "drafts"))]


def alone(case, backend):
    return {name: output.detach() for name, output in case.subject.run(case.inputs(), backend).items()}


def assert_as_alone(case, backend, expected, placements, mesh):
    """expected: the outputs of one process   placements: by name, of the tensors that are not replicated"""
    subject, everywhere = case.subject, [Replicate()] * mesh.ndim
    tensors = {name: distribute_tensor(t, mesh, placements.get(name, everywhere)) for name, t in case.inputs().items()}
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    leaves = {name: t.requires_grad_() for name, t in floating.items() if subject.differentiable}
    outputs = subject.run(tensors, backend)
    cotangents = accuracy.random_cotangents(subject, expected)
    exact = accuracy.truth(subject, case.inputs(), cotangents, expected)
    for name, output in outputs.items():
        assert isinstance(output, DTensor), str(case)
        assert backend == "reference" or Replicate() not in output.placements, (str(case), name, output.placements)
        if backend == "reference":  # its matrix product has other bits with other numbers of rows or threads
            assert_close({(str(case), name): output.full_tensor()}, {(str(case), name): exact[name]})
        else:
            assert torch.equal(output.full_tensor(), expected[name]), (str(case), name)
    pairs = zip(subject.differentiable, cotangents)
    given = [distribute_tensor(cotangent, mesh, outputs[name].placements) for name, cotangent in pairs]
    for name, gradient in accuracy.gradients_of(outputs, leaves, given).items():
        wanted = placements.get(name.removeprefix("d"), [Partial()] * mesh.ndim)
        assert backend == "reference" or list(gradient.placements) == wanted, (str(case), name, gradient.placements)
        assert_close({(str(case), name): gradient.full_tensor()}, {(str(case), name): exact[name]})


def in_a_row(*groups):
    """Check all cases of these (cases, backend) on two ranks. Returns the names of the ops that ran."""
    assert "mhc_ops.distributed" not in sys.modules  # the first DTensor brings the rules
    ready = [(case, axis, backend, alone(case, backend)) for cases, backend in groups for case, axis in cases]
    mesh, seen, launch = init_device_mesh("cpu", (2,)), set(), Op.launch
    Op.launch = lambda op, **inputs: (seen.add(op.name), launch(op, **inputs))[1]
    for case, axis, backend, expected in ready:
        sharded = {name: tensor.dim() for name, tensor in case.inputs().items() if name in axis}
        placements = {name: [Shard(axis[name] % count)] for name, count in sharded.items()}
        assert_as_alone(case, backend, expected, placements, mesh)
    return seen


def on_kernels():
    seen = in_a_row((MHC, "triton"), (CONV, "hip"), (CONV_OF_TRITON, "triton"))
    assert_redistributed(init_device_mesh("cpu", (2,)))
    return seen


def on_the_reference():
    in_a_row((MHC, "reference"), (CONV, "hip"))


def placed(tensors, mesh, *dimensions):
    """The tensors, each sharded along its dimension; None: replicated"""
    placements = [[Replicate() if dimension is None else Shard(dimension)] for dimension in dimensions]
    return {name: distribute_tensor(t, mesh, own) for (name, t), own in zip(tensors.items(), placements, strict=True)}


def assert_redistributed(mesh):
    """torch moves tensors that no rule allows, but not one that is written to: the copy would be dropped."""
    tensors = of_mhc(cases.MHC_POST).inputs()
    expected = mhc_ops.mhc_post(**tensors, backend="triton")
    for dimensions in ((1, None, None, None), (None, 1, 1, None), (0, 1, 1, 1), (3, 1, 1, 1)):
        found = mhc_ops.mhc_post(**placed(tensors, mesh, *dimensions), backend="triton")
        assert found.placements == (Shard(1),) and torch.equal(found.full_tensor(), expected), dimensions
    tensors = of_conv(1, 6, bias=False).inputs()
    found = mhc_ops.causal_conv1d(**placed(tensors, mesh, 1, None), backend="hip")
    assert torch.equal(found.full_tensor(), mhc_ops.causal_conv1d(**tensors, backend="hip"))
    slots = placed(of_conv(2, 1, places="slots", update=True).inputs(), mesh, None, None, None, 0, None)
    with pytest.raises(RuntimeError, match=r"^causal_conv1d_update_: cannot write in place to conv_state \[Shard"):
        mhc_ops.causal_conv1d_update(**slots, backend="triton")


def compiled():
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.randn(2, 4, n, D), mesh, [Shard(1)]).requires_grad_()
    mean = torch.compile(lambda x: mhc_ops.mhc_mean(x, backend="triton"), backend="aot_eager", fullgraph=True)
    found = mean(x)
    found.sum().backward()
    assert found.placements == (Shard(1),) and (x.grad.full_tensor() == 1 / n).all()


@pytest.mark.interpreted
@older_torch.FIRST_ARGUMENT
def test_compiled_before_any_other_call():
    run(1, compiled)


def all_ops():
    return importlib.import_module("mhc_ops.distributed.sharding").ops()


def test_every_op_has_rules():
    ops = all_ops()
    registered = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert [op.name for op in ops if op.traced._opoverload not in registered] == []
    assert {op.family for op in ops} == {"mhc", "conv"}


@pytest.mark.interpreted
@older_torch.FIRST_ARGUMENT
def test_every_op_on_two_ranks():
    for seen in run(2, on_kernels):
        assert seen == {op.name for op in all_ops()}


@older_torch.MATRIX_PRODUCT
def test_reference_on_two_ranks():
    run(2, on_the_reference)


def on_four_ranks():
    """Batch and sequence on a mesh of two dimensions; then six tokens, of which the last rank has none."""
    for outer, sizes, placements in (((2, 4), (2, 2), [Shard(0), Shard(1)]), ((1, 6), (4,), [Shard(1)])):
        case = Case(cases.MHC_LAYER.with_options(sinkhorn_iters=2), outer, n, D, torch.float32)
        of_tokens = dict.fromkeys(("x", "h_out"), placements)
        assert_as_alone(case, "triton", alone(case, "triton"), of_tokens, init_device_mesh("cpu", sizes))


@pytest.mark.interpreted
def test_mesh_of_two_dimensions_and_a_rank_without_tokens():
    run(4, on_four_ranks)
