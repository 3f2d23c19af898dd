"""Every mHC op in every kernel backend: the same bits in every run, and of a token in every batch."""

import pytest
import torch
from mhc_kernels import bf16, by_any_subject, cotangents_of, fp16, fp32, needs, on_gpu

from mhc_ops.measure import accuracy, cases


def assert_same_in_any_batch(subject, T, D, backend, device):
    tensors = cases.Case(subject, (T,), 4, D, bf16).inputs(device)
    per_token = ("x", "h_out", "h_post", "h_res", "logits")

    def call(rows):
        some = {name: t[rows] if name in per_token else t for name, t in tensors.items()}
        return subject.call(**some, backend=backend)

    whole = call(slice(None))
    for rows in (slice(0, 1), slice(3, 10), slice(5, 133), slice(T - 7, T)):
        assert all(torch.equal(p, w[rows]) for p, w in zip(call(rows), whole))


@by_any_subject
def test_token_is_the_same_in_any_batch(subject, place):
    assert_same_in_any_batch(subject, 150, 300, *place)


@on_gpu
@by_any_subject
def test_token_is_the_same_in_a_batch_that_fills_the_device(subject, backend):
    """Alone, among 7, among 128, and among 4096 and more."""
    needs(backend)
    for T, D in ((4096, 4096), (16384, 1280)):
        assert_same_in_any_batch(subject, T, D, backend, "cuda")


@by_any_subject
def test_same_bits_twice(subject, place):
    case = cases.Case(subject, (50,), 4, 200, bf16)
    first, second = (accuracy.run_case(case, *place).results for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_gpu
@by_any_subject
@pytest.mark.parametrize(
    ("T", "n", "D", "dtype"), [(4096, 4, 2560, bf16), (1500, 5, 512, fp16), (4096, 4, 256, fp32), (4096, 3, 257, bf16)]
)
def test_same_bits_again_and_again(subject, backend, T, n, D, dtype):
    """What a copy overwrites while it is still being read shows once in ten or a hundred runs of a full device."""
    needs(backend)
    tensors = cases.Case(subject, (T,), n, D, dtype).inputs("cuda")
    cotangents = cotangents_of(subject, tensors, backend)
    first = accuracy.run(subject, tensors, backend, cotangents)
    for _ in range(200):
        again = accuracy.run(subject, tensors, backend, cotangents)
        assert [name for name in first if not torch.equal(first[name], again[name])] == []
