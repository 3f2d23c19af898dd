"""Every op on DTensors: the bits of one process forward, its gradients to rounding, and where results are placed."""

import importlib
import sys

import older_torch
import pytest
import torch
from one_process import assert_close, exact_gradients
from processes import run
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import mhc_ops
from mhc_ops.core.op import Op

n, D, W = 2, 8, 3
M = n * n + 2 * n
TOKENS = Shard(1)
CHANNELS = {"x": Shard(2), "residual": Shard(2), "weight": Shard(0), "bias": Shard(0), "initial_state": Shard(1)}
BATCH = dict.fromkeys(("x", "residual", "seq_idx", "initial_state", "conv_state", "cache_seqlens"), Shard(0))
OF_TOKENS = dict.fromkeys(("x", "h_out", "h_pre", "h_post", "h_res", "read", "logits"), TOKENS)
HALVES = dict.fromkeys(OF_TOKENS, Shard(0))


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(x, **of_pre):
    return mhc_ops.mhc_layer(x, torch.tanh, **of_pre)


def two_layers(x, phi, alpha, bias, shifted=False, **of_pre):
    h_in, carry = mhc_ops.mhc_enter(x, phi, alpha, bias, shifted=shifted, **of_pre)
    h_in, carry = mhc_ops.mhc_next(carry, h_in.tanh(), phi, alpha, bias, **of_pre)
    return mhc_ops.mhc_leave(carry, h_in.tanh(), backend=of_pre["backend"])


def shifted(*args, backend, **of_pre):
    return mhc_ops.mhc_read(*two_layers(*args, **of_pre, shifted=True, backend=backend), backend=backend)


def expand(x, backend):
    return mhc_ops.mhc_expand(x, n)


def update(x, conv_state, **others):
    return mhc_ops.causal_conv1d_update(x, conv_state, **others), conv_state


def prefill(x, conv_state, **others):
    return mhc_ops.causal_conv1d_prefill(x, conv_state, **others), conv_state


X, H_OUT, MAPS = random(2, 4, n, D), random(2, 4, D), {"h_post": random(2, 4, n), "h_res": random(2, 4, n, n)}
OF_PRE = {"phi": random(M, n * D), "alpha": random(3), "bias": random(M), "sinkhorn_iters": 2}
OF_IDENTITY = {"phi": random(2 * n, n * D), "alpha": random(2), "bias": random(2 * n)}
OF_HEAD = {"phi": random(n, n * D), "alpha": random(1), "bias": random(n)}
NORMS = {"gamma": random(n, D), "layer_norm_weight": random(D)}
FILTER = {"weight": random(D, W), "bias": random(D)}
PIECE = {"x": random(2, 6, D), **FILTER}
SEQUENCES = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 2, 2]], dtype=torch.int32)
PACKED = torch.tensor([0, 2, 5], dtype=torch.int32)
STEP = {"x": random(2, D), "conv_state": random(2, D, W - 1), **FILTER}
SLOTS = {**STEP, "conv_state": random(5, D, W - 1), "conv_state_indices": torch.tensor([3, 1])}
STREAMS = {"x": random(2, 2, n, D), "gamma": random(n, D), "weight": random(n * D, W)}
SILU, STATES = {"activation": "silu"}, {"output_final_state": True, "initial_state": random(2, D, W - 1)}

# function, its arguments, placements of tensors that are not replicated
MHC = [
    (mhc_ops.sinkhorn, {"logits": random(2, 4, n, n), "iters": 2}, OF_TOKENS),
    (mhc_ops.mhc_pre, {"x": X, **OF_PRE, **NORMS}, OF_TOKENS),
    (mhc_ops.mhc_pre, {"x": X, **OF_IDENTITY, "residual": "identity"}, HALVES),
    (mhc_ops.mhc_maps, {"x": X, **OF_PRE}, OF_TOKENS),
    (mhc_ops.mhc_read, {"x": X, "h_pre": random(2, 4, n)}, OF_TOKENS),
    (layer, {"x": X, **OF_PRE}, OF_TOKENS),  # then mhc_post, whose backward differs by a flag alone
    (mhc_ops.mhc_post, {"x": X, "h_out": H_OUT, **MAPS}, OF_TOKENS),
    (mhc_ops.mhc_post_pre, {"x": X, "h_out": H_OUT, **MAPS, **OF_PRE}, OF_TOKENS),
    (two_layers, {"x": X, **OF_PRE}, OF_TOKENS),
    (shifted, {"x": X, **OF_PRE}, OF_TOKENS),
    (mhc_ops.mhc_head, {"x": X, **OF_HEAD}, OF_TOKENS),
    (mhc_ops.mhc_mean, {"x": X}, HALVES),
    (expand, {"x": H_OUT}, OF_TOKENS),
]
CONV = [
    (mhc_ops.causal_conv1d, {**PIECE, **STATES, **SILU}, BATCH),
    (mhc_ops.causal_conv1d, {**PIECE, **STATES, **SILU}, CHANNELS),
    (mhc_ops.causal_conv1d, {**PIECE, "seq_idx": SEQUENCES}, BATCH),
]
IN_ONE_ROW = {**PIECE, "x": random(1, 6, D), "residual": random(1, 6, D), "cu_seqlens": PACKED}
OF_SLOTS = {"x": Shard(1), "conv_state": Shard(1), "weight": Shard(0), "bias": Shard(0)}
CONV_OF_TRITON = [
    (mhc_ops.causal_conv1d, IN_ONE_ROW, CHANNELS),
    (update, STEP, BATCH),
    (update, SLOTS, OF_SLOTS),
    (update, {**SLOTS, "num_accepted_tokens": torch.tensor([1, 1])}, OF_SLOTS),
    (prefill, {**SLOTS, "x": random(6, D), "cu_seqlens": PACKED}, OF_SLOTS),
    (mhc_ops.short_conv, STREAMS, BATCH),
]


def outputs_of(function, arguments):
    result = function(**arguments)
    return [output for output in (result if isinstance(result, tuple) else (result,)) if output is not None]


def loss_of(outputs):
    return sum(output.square().sum() for output in outputs)


def leaves_of(arguments):
    """The tensors that get a gradient, by name."""
    return {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}


def results(function, arguments):
    """What it returns, and the gradients of its tensors by name."""
    outputs = outputs_of(function, arguments)
    gradients = {}
    if outputs[0].requires_grad:
        loss_of(outputs).backward()
        gradients = {name: leaf.grad for name, leaf in leaves_of(arguments).items()}
    return [output.detach() for output in outputs], gradients


def exact_results(function, arguments):
    """The same of the reference in fp64."""
    arguments = fresh(arguments, "reference", lambda name, t: t.double() if t.is_floating_point() else t)
    outputs = outputs_of(function, arguments)
    differentiable = outputs[0].requires_grad
    gradients = exact_gradients(loss_of, outputs, leaves_of(arguments)) if differentiable else {}
    return [output.detach() for output in outputs], gradients


def fresh(arguments, backend, place=lambda name, tensor: tensor):
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    placed = {name: place(name, tensor.clone()) for name, tensor in tensors.items()}
    placed = {name: t.requires_grad_(t.is_floating_point() and name != "conv_state") for name, t in placed.items()}
    return {**arguments, **placed, "backend": backend}


def assert_as_alone(case, backend, expected_outputs, placements, mesh):
    """placements: of the tensors that are not replicated, by name"""
    function, arguments, _ = case

    def place(name, tensor):
        return distribute_tensor(tensor, mesh, placements.get(name, [Replicate()] * mesh.ndim))

    outputs, gradients = results(function, fresh(arguments, backend, place))
    exact_outputs, exact = exact_results(function, arguments)
    for output, expected, truth in zip(outputs, expected_outputs, exact_outputs, strict=True):
        assert isinstance(output, DTensor), function
        assert backend == "reference" or Replicate() not in output.placements, (function, output.placements)
        if backend == "reference":  # its matrix product has other bits with other numbers of rows or threads
            assert_close({function: output.full_tensor()}, {function: truth})
        else:
            assert torch.equal(output.full_tensor(), expected), function
    for name, gradient in gradients.items():
        wanted = placements.get(name, [Partial()] * mesh.ndim)
        assert backend == "reference" or list(gradient.placements) == wanted, (function, name, gradient.placements)
    assert_close(*({(function, name): whole(g) for name, g in of.items()} for of in (gradients, exact)))


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def in_a_row(*groups):
    """Check all cases of these (cases, backend) on two ranks. Returns the names of the ops that ran."""
    assert "mhc_ops.distributed" not in sys.modules  # the first DTensor brings the rules
    cases = [(case, backend, alone(case, backend)) for cases, backend in groups for case in cases]
    mesh, seen, launch = init_device_mesh("cpu", (2,)), set(), Op.launch
    Op.launch = lambda op, **inputs: (seen.add(op.name), launch(op, **inputs))[1]
    for case, backend, expected in cases:
        assert_as_alone(case, backend, expected, {name: [placement] for name, placement in case[2].items()}, mesh)
    return seen


def alone(case, backend):
    """The outputs of one process."""
    return results(case[0], fresh(case[1], backend))[0]


def on_kernels():
    seen = in_a_row((MHC, "triton"), (CONV, "hip"), (CONV_OF_TRITON, "triton"))
    assert_redistributed(init_device_mesh("cpu", (2,)))
    return seen


def on_the_reference():
    in_a_row((MHC, "reference"), (CONV, "hip"))


def assert_redistributed(mesh):
    """torch moves tensors that no rule allows, but not one that is written to: the copy would be dropped."""
    tensors = {"x": X, "h_out": H_OUT, **MAPS}
    expected = mhc_ops.mhc_post(**tensors, backend="triton")
    for x, h_out, h_post, h_res in ((1, None, None, None), (None, 1, 1, None), (0, 1, 1, 1), (3, 1, 1, 1)):
        places = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res}
        found = mhc_ops.mhc_post(
            **{name: placed(tensor, mesh, places[name]) for name, tensor in tensors.items()}, backend="triton"
        )
        assert found.placements == (TOKENS,) and torch.equal(found.full_tensor(), expected), places
    in_order = {"x": random(1, 6, D), "weight": FILTER["weight"]}
    pieces = {"x": placed(in_order["x"], mesh, 1), "weight": placed(in_order["weight"], mesh, None)}
    found = mhc_ops.causal_conv1d(**pieces, backend="hip")
    assert torch.equal(found.full_tensor(), mhc_ops.causal_conv1d(**in_order, backend="hip"))
    slots = {name: placed(value, mesh, 0 if name == "conv_state" else None) for name, value in SLOTS.items()}
    with pytest.raises(RuntimeError, match=r"^causal_conv1d_update_: cannot write in place to conv_state \[Shard"):
        mhc_ops.causal_conv1d_update(**slots, backend="triton")


def placed(tensor, mesh, dimension):
    return distribute_tensor(tensor, mesh, [Replicate() if dimension is None else Shard(dimension)])


def compiled():
    mesh = init_device_mesh("cpu", (1,))
    x = placed(X, mesh, 1).requires_grad_()
    mean = torch.compile(lambda x: mhc_ops.mhc_mean(x, backend="triton"), backend="aot_eager", fullgraph=True)
    found = mean(x)
    found.sum().backward()
    assert found.placements == (TOKENS,) and torch.equal(x.grad.full_tensor(), torch.full_like(X, 1 / n))


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
    for x, sizes, placements in ((X, (2, 2), [Shard(0), TOKENS]), (random(1, 6, n, D), (4,), [TOKENS])):
        case = layer, {"x": x, **OF_PRE}, OF_TOKENS
        assert_as_alone(case, "triton", alone(case, "triton"), {"x": placements}, init_device_mesh("cpu", sizes))


@pytest.mark.interpreted
def test_mesh_of_two_dimensions_and_a_rank_without_tokens():
    run(4, on_four_ranks)
