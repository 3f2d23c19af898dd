"""Make bf16 exact in Triton's interpreter, which truncates in casts and computes on raw bits elsewhere.

Seen in triton 3.6 to 3.9. Without this, `TRITON_INTERPRET=1` gives plausible nonsense for bf16 tensors.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def is_bf16(handle):
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widen(handle):
    """bf16, which the interpreter keeps as uint16, to fp32; anything else as it is."""
    if not is_bf16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(data):
    """fp32 to bf16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def in_fp32(method):
    """Compute on widened operands; round where the result would have been bf16."""

    def wrapped(self, *operands, **options):
        result = method(self, *map(widen, operands), **options)
        if any(map(is_bf16, operands)) and result.dtype.scalar == tl.float32 and result.data.dtype == np.float32:
            return TensorHandle(narrow(result.data), tl.bfloat16)
        return result

    return wrapped


def make_bf16_exact() -> None:
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def exact_cast(self, source, to):
        wide = widen(source)
        if to.scalar != tl.bfloat16:
            return cast(self, wide, to)
        return TensorHandle(narrow(wide.data.astype(np.float32)), tl.bfloat16)

    def exact_dot(self, a, b, d, *options):
        return dot(self, widen(a), widen(b), d, *options)

    InterpreterBuilder.cast_impl = exact_cast
    InterpreterBuilder.create_fp_to_fp = lambda self, source, to, rounding: exact_cast(self, source, to)
    InterpreterBuilder.create_dot = exact_dot
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(InterpreterBuilder, name, in_fp32(getattr(InterpreterBuilder, name)))
