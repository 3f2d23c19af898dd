"""What torch knows of a tensor beside its memory: kernels do not see it, and the values are right all the same.

Strides that a hook of autograd changed, the bit by which torch negates, versions, memory that tensors share, tensors
of other kinds."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import mhc_ops
from mhc_ops.conv import contracts as conv_contracts
from mhc_ops.testing import accuracy, cases
from mhc_ops.testing.cases import Case
from mhc_ops.testing.conv_cases import ConvCase

CONV = (
    ConvCase(1, 4, 3, 3, torch.float32),
    ConvCase(1, 4, 3, 2, torch.float32, places="cu_seqlens states"),
    ConvCase(1, 4, 3, 2, torch.float32, n=2),
)
ON_HIP = (CONV[0], *(ConvCase(1, 4, 3, 3, torch.float32, places=places) for places in ("states", "seq_idx")))
ON_TRITON = (*(Case(subject, (2,), 2, 8, torch.float32) for subject in cases.ALL), *CONV, *ON_HIP[1:])
RUNS = [
    *(pytest.param(case, "triton", marks=pytest.mark.interpreted, id=f"triton {case}") for case in ON_TRITON),
    *(pytest.param(case, "hip", id=f"hip {case}") for case in ON_HIP),
]


def transposed(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else strided(tensor)


def strided(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 7)], -1)[..., 0]


def negated(tensor):
    return torch._neg_view(-tensor)


OTHERWISE = (transposed, strided, negated)


def assert_same(found, expected):
    assert {name: torch.equal(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, True)


@pytest.mark.parametrize(("case", "backend"), RUNS)
def test_only_values_count(case, backend):
    """Tensors that hooks of autograd bring back with other strides or negated by torch's bit, and inputs and cotangents
    that are negated so: the same bits."""
    ran = accuracy.run_case(case, backend)
    turn = itertools.count()

    def brought_back(tensor):
        return OTHERWISE[next(turn) % len(OTHERWISE)](tensor)

    for _ in OTHERWISE:  # each tensor in another way
        with saved_tensors_hooks(lambda tensor: tensor, brought_back):
            assert_same(accuracy.run(case.subject, ran.tensors, backend, ran.cotangents), ran.results)
        next(turn)
    tensors = {name: tensor if name == "link" else negated(tensor) for name, tensor in ran.tensors.items()}
    cotangents = [None if cotangent is None else negated(cotangent) for cotangent in ran.cotangents]
    for _ in range(2):  # the second is a kept call
        assert_same(accuracy.run(case.subject, tensors, backend, cotangents), ran.results)


@pytest.mark.interpreted
def test_a_state_that_torch_negates():
    """It is written to, so it is refused."""
    with pytest.raises(ValueError, match=r"must be no negated view for backend 'triton': pass conv_state.resolve_neg"):
        update(torch.randn(2, 4, 2, dtype=torch.complex64).conj().imag)


@pytest.mark.interpreted
def test_zeros_without_memory():
    """torch makes them of derivatives that are zero; their address is 0."""
    x, h = torch._efficientzerotensor((3, 2, 16)), torch.randn(3, 2)
    assert torch.equal(mhc_ops.mhc_read(x, h, backend="triton"), torch.zeros(3, 16))
    x = torch.randn(3, 2, 16, requires_grad=True)
    y = mhc_ops.mhc_read(x, h, backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch._efficientzerotensor((3, 16)))
    assert torch.equal(dx, torch.zeros_like(x))


@pytest.mark.interpreted
def test_a_compiled_step_under_hooks():
    """torch.compile runs the hooks between its two graphs, of which the second calls the op."""

    def step(x, h, hook):
        torch._dynamo.reset()
        read = torch.compile(lambda x, h: mhc_ops.mhc_read(x, h, backend="triton"), backend="aot_eager")
        with saved_tensors_hooks(lambda tensor: tensor, hook):
            y = read(x, h)
        return torch.autograd.grad(y, (x, h), torch.ones_like(y))

    x, h = torch.randn(3, 2, 16, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    for one, other in zip(step(x, h, transposed), step(x, h, lambda tensor: tensor), strict=True):
        assert torch.equal(one, other)


def update(state, x=None, weight=None, backend="triton"):
    x = torch.randn(state.shape[:2]) if x is None else x
    return mhc_ops.causal_conv1d_update(x, state, torch.randn(4, 3) if weight is None else weight, backend=backend)


def update_by_torch(state, backend):
    """As torch calls the op."""
    tensors = {"x": torch.randn(2, 4), "conv_state": state, "weight": torch.randn(4, 3)}
    missing = dict.fromkeys(("bias", "cache_seqlens", "conv_state_indices"))
    numbers = {"silu": False, "dilation": 1, "pad_slot_id": -1}
    conv_contracts.causal_conv1d_update_.dispatched(**tensors, **missing, **numbers, backend=backend)


EAGER_AND_TRITON = ["reference", pytest.param("triton", marks=pytest.mark.interpreted)]


@pytest.mark.parametrize("backend", EAGER_AND_TRITON)
def test_autograd_knows_that_a_state_was_written_to(backend):
    p, state = torch.randn(2, 4, 2, requires_grad=True), torch.ones(2, 4, 2)
    for write in (update, update, *[update_by_torch] * (backend == "triton")):  # the second is a kept call
        loss = (p * state).sum()
        write(state, backend=backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_state_of_windows_is_refused():
    with pytest.raises(ValueError, match="conv_state must have memory of its own for each element"):
        update(torch.zeros(2, 9).as_strided((2, 4, 2), (9, 1, 2)), backend="reference")


@pytest.mark.parametrize("backend", EAGER_AND_TRITON)
def test_a_state_of_inference(backend):
    """Torch changes an inference tensor within inference mode only."""
    with torch.inference_mode():
        state = torch.ones(2, 4, 2)
        for _ in range(2):
            update(state, backend=backend)
    before = state.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="conv_state must be no inference tensor outside of inference mode"):
            update(state, backend=backend)
    assert torch.equal(state, before)


@pytest.mark.interpreted
def test_inputs_in_the_memory_of_the_state():
    """x and weight are slices of what is written to; the second call is a kept one."""

    def step(backend):
        memory = torch.arange(40.0).sin()
        state = memory[:16].view(2, 4, 2)
        weight, x = memory[4:16].view(4, 3), memory[8:16].view(2, 4)
        return [update(state, x, weight, backend) for _ in range(2)], memory

    (ys, memory), (expected, expected_memory) = step("triton"), step("reference")
    torch.testing.assert_close(ys, expected)
    torch.testing.assert_close(memory, expected_memory)


PROGRAM = """
import warnings; warnings.simplefilter("ignore")
import torch, mhc_ops
def refused(call, t):
    for kind in KINDS:
        call(t)
        try:
            call(kind(t))
        except TypeError as error:
            assert "must be a dense (strided) tensor" in str(error), error
        else:
            raise SystemExit("accepted")
KINDS = (
    lambda t: torch.nested.nested_tensor(list(t)),
    lambda t: t.to_sparse(),
    lambda t: t.float().to_mkldnn(),
)
x, w, ids = torch.randn(2, 5, 4), torch.randn(4, 3), torch.zeros(2, 5, dtype=torch.int32)
refused(lambda x: mhc_ops.causal_conv1d(x, w, backend="hip"), x)
refused(lambda w: mhc_ops.causal_conv1d(x, w, backend="hip"), w)
refused(lambda ids: mhc_ops.causal_conv1d(x, w, seq_idx=ids, backend="hip"), ids)
"""


def test_tensors_of_another_kind_end_no_process():
    """The guards that compare a call with an earlier one abort on tensors without sizes or strides."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("backend", EAGER_AND_TRITON)
def test_a_carry_with_a_wrong_link(backend):
    x, maps = torch.randn(3, 2, 8), (torch.rand(3, 2), torch.rand(3, 2, 2))
    for link in (5, torch.zeros(3, 2, 8).to_sparse(), torch.zeros(3, 2, 9)):
        with pytest.raises((TypeError, ValueError), match="mhc_leave: link must be "):
            mhc_ops.mhc_leave(mhc_ops.Carry(x, *maps, None, link), torch.randn(3, 8), backend=backend)


@pytest.mark.interpreted
def test_wrappers_without_a_class_of_their_own():
    """Wrappers of functionalization and of a transform that ended have no memory, so torch calls the op."""
    x, h = torch.randn(3, 2, 16), torch.randn(3, 2)
    expected = mhc_ops.mhc_read(x, h, backend="triton")
    wrapped = torch._to_functional_tensor(x)
    y = mhc_ops.mhc_read(wrapped, torch._to_functional_tensor(h), backend="triton")
    torch._sync(y)
    assert torch.equal(torch._from_functional_tensor(y), expected)


@pytest.mark.interpreted
def test_memory_that_was_given_back():
    """As FSDP does with parameters between two uses; the address is 0."""
    x, h = torch.randn(3, 2, 16), torch.randn(3, 2)
    for _ in range(2):
        mhc_ops.mhc_read(torch.randn(3, 2, 16), h, backend="triton")
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="mhc_read_fwd: x must have memory"):
            mhc_ops.mhc_read(x, h, backend="triton")
