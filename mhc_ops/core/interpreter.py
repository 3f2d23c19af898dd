"""Repair Triton's interpreter: bf16 becomes exact, and sums have one order on every CPU.

The interpreter truncates bf16 in casts and computes on raw bits elsewhere (triton 3.6 to 3.9). Without this module,
`TRITON_INTERPRET=1` gives plausible nonsense for bf16 tensors.

It multiplies matrices with numpy's BLAS, whose order of summation depends on the CPU, the shapes and the threads. A
kernel that gives a token the same bits in every batch on a GPU would not do so there.
"""

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def is_bf16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widen(handle):
    """Widens bf16, which the interpreter keeps as uint16, to fp32. Other types stay."""
    if not is_bf16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(data):
    """Rounds fp32 to bf16 bits, to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def in_fp32(method):
    """Computes on widened operands, and rounds where the result would be bf16."""

    def wrapped(self, *operands, **options):
        result = method(self, *map(widen, operands), **options)
        if any(map(is_bf16, operands)) and result.dtype.scalar == tl.float32 and result.data.dtype == np.float32:
            return TensorHandle(narrow(result.data), tl.bfloat16)
        return result

    return wrapped


def added(terms, axis):
    """The sum along one axis, by halves. Its order depends only on the number of terms, a power of two."""
    while terms.shape[axis] > 1:
        low, high = np.split(terms, 2, axis=axis)
        terms = low + high
    return terms


def product(a, b, dtype):
    """a @ b, each element as `added` adds it."""
    terms = np.multiply(a[..., :, :, None], b[..., None, :, :], dtype=dtype)
    return added(terms, axis=-2)[..., 0, :]


# Private names of Triton, which this module replaces.
REPLACED = {
    InterpreterBuilder: (
        "cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "ternary_op", "create_fma", "create_dot",
    ),
    ReduceOps: ("sum",),
}  # fmt: skip


def lacks() -> list[str]:
    """The names that this Triton does not have."""
    return [f"{of.__name__}.{name}" for of, names in REPLACED.items() for name in names if not hasattr(of, name)]


def repair() -> None:
    if lacks():  # a method under a name that nothing calls would leave bf16 as it is
        names = ", ".join(lacks())
        raise ImportError(f"TRITON_INTERPRET=1: triton {triton.__version__} has no {names}; triton 3.6 to 3.9 do")
    _make_bf16_exact()
    _sum_in_one_order()


def _make_bf16_exact() -> None:
    cast = InterpreterBuilder.cast_impl

    def exact_cast(self, source, to):
        wide = widen(source)
        if to.scalar != tl.bfloat16:
            return cast(self, wide, to)
        return TensorHandle(narrow(wide.data.astype(np.float32)), tl.bfloat16)

    InterpreterBuilder.cast_impl = exact_cast
    InterpreterBuilder.create_fp_to_fp = lambda self, source, to, rounding: exact_cast(self, source, to)
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(InterpreterBuilder, name, in_fp32(getattr(InterpreterBuilder, name)))


def _sum_in_one_order() -> None:
    numpy_dot, numpy_sum = InterpreterBuilder.create_dot, ReduceOps.sum

    def ordered_dot(self, a, b, d, *options):
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):  # integers, or fp8, which numpy lacks
            return numpy_dot(self, a, b, d, *options)
        return TensorHandle(product(widen(a).data, widen(b).data, d.data.dtype) + d.data, d.dtype.scalar)

    def ordered_sum(self, input):
        data = input.handle.data
        if not np.issubdtype(data.dtype, np.floating):
            return numpy_sum(self, input)
        axes = range(data.ndim) if self.axis is None else (self.axis,)
        for axis in axes:
            data = added(data, axis)
        return self.to_tensor(data if self.keep_dims else data.squeeze(tuple(axes)), input.dtype)

    InterpreterBuilder.create_dot = ordered_dot
    ReduceOps.sum = ordered_sum
