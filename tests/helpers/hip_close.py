"""What kernels are held to: one rounding of the output's type, and for sums 1e-5 of the tensor's root mean square."""

import torch

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
LEAST_OF_HALF = 2**-25  # half of fp16's smallest number: below 2^-14 it rounds to multiples of that


def assert_close(got, want, name):
    error = (got.double() - want).abs()
    bound = ROUNDING[got.dtype] * 1.001 * want.abs() + 1e-5 * want.square().mean().sqrt() + LEAST_OF_HALF
    assert bool((error <= bound).all()), f"{name}: {error.max():.3e}"
