"""Every mHC op in every kernel backend: the same bits in every run, and of a token in every batch."""

import pytest
import torch
from mhc_kernels import bf16, by_any_subject, cotangents_of, fp16, fp32, needs, on_gpu

from mhc_ops.testing import accuracy, cases, fuzz

by_every_subject = pytest.mark.parametrize("subject", cases.ALL, ids=lambda subject: subject.name)


@by_every_subject
def test_token_is_the_same_in_any_batch(subject, place, monkeypatch):
    """With gamma and the norm, with gradients and without, in a batch that one form of the kernels takes and in slices
    of it that this form takes or the other."""
    monkeypatch.setattr(fuzz, "BATCHES_ON_CPU", (70,))
    monkeypatch.setattr(fuzz, "BATCHES", (600,))
    case = cases.Case(subject, (1,), 4, 40, bf16)
    for tokens in (3, 65) if case.runs_on(place[0]) else ():
        monkeypatch.setattr(fuzz, "SHARES", (tokens,))
        assert fuzz.in_any_batch(case, place[0], torch.device(place[1])) == []


@on_gpu
@by_every_subject
def test_token_is_the_same_in_a_batch_that_fills_the_device(subject, backend):
    """Alone, among 7, among 128, and among 4096 and more: the forward, as gradients of a boundary have two orders."""
    needs(backend)
    for T, D in ((4096, 4096), (16384, 1280)):
        case = cases.Case(subject, (T,), 4, D, bf16)
        tensors = case.inputs("cuda")
        whole = accuracy.run(subject, tensors, backend) if case.runs_on(backend) else {}
        for rows in (slice(0, 1), slice(3, 10), slice(5, 133), slice(T - 7, T)) if whole else ():
            some = {name: t[rows] if name in fuzz.PER_TOKEN else t for name, t in tensors.items()}
            part = accuracy.run(subject, some, backend)
            assert [name for name in part if fuzz.differ(part[name], whole[name][rows])] == []


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
