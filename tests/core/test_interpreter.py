"""Triton's interpreter as repaired: a sum has one order, which neither the CPU's BLAS nor the other rows decide."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mhc_ops.core import interpreter
from mhc_ops.core.backend import _repair_interpreter
from mhc_ops.testing.cases import SEED


def by_halves(terms):
    """The order itself, one fp32 addition at a time."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [low + high for low, high in zip(terms[:half], terms[half:])]
    return terms[0]


def random(*shape):
    return np.random.default_rng(SEED).standard_normal(shape, dtype=np.float32)


def test_a_triton_without_a_name_that_is_replaced(monkeypatch):
    """It would leave bf16 as it is."""
    monkeypatch.setitem(interpreter.REPLACED, interpreter.ReduceOps, ("sum", "gone"))
    with pytest.raises(ImportError, match=r"^TRITON_INTERPRET=1: triton \S+ has no ReduceOps\.gone; triton 3\.6 to"):
        interpreter.repair()


@triton.jit
def dot_and_sums_kernel(a_ptr, b_ptr, dot_ptr, rows_ptr, all_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k)
    b = tl.load(b_ptr + k[:, None] * N + n)
    tl.store(dot_ptr + m[:, None] * N + n, tl.dot(a, b, input_precision="ieee"))
    tl.store(rows_ptr + m, tl.sum(a, axis=1))
    tl.store(all_ptr, tl.sum(a))


@pytest.mark.interpreted
def test_kernels_add_so():
    """tl.dot and tl.sum of an interpreted kernel."""
    _repair_interpreter()
    M, K, N = 16, 64, 16
    a, b = random(M, K), random(K, N)
    dot, rows, whole = torch.empty(M, N), torch.empty(M), torch.empty(1)
    dot_and_sums_kernel[(1,)](torch.from_numpy(a), torch.from_numpy(b), dot, rows, whole, M=M, K=K, N=N)
    columns = [by_halves(list(a[:, k])) for k in range(K)]
    assert np.array_equal(dot.numpy(), np.array([[by_halves(list(row * column)) for column in b.T] for row in a]))
    assert np.array_equal(rows.numpy(), np.array([by_halves(list(row)) for row in a]))
    assert whole.item() == by_halves(columns)
