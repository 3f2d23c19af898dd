"""Every mHC op in every kernel backend: a token has the same bits in every batch, and in every run."""

import pytest
import torch
from mhc_kernels import MOST, bf16, by, cotangents_of, fp16, fp32, needs, on_gpu

from mhc_ops.testing import accuracy, cases, fuzz

# of a batch; one launch takes the small ones
PARTS = (slice(0, 1), slice(3, 19), slice(100, 164), slice(5, 133), slice(7, 650), slice(-7, None))


@by(cases.ALL)
def test_token_is_the_same_in_any_batch(subject, kernels, monkeypatch):
    """With gamma and the norm, with gradients and without, in a batch that one form of the kernels takes and in slices
    of it that this form takes or the other."""
    monkeypatch.setattr(fuzz, "BATCHES_ON_CPU", (70,))
    monkeypatch.setattr(fuzz, "BATCHES", (600,))
    case = cases.Case(subject, (1,), 4, 40, bf16)
    for tokens in (3, 65) if case.runs_on(kernels[0]) else ():
        monkeypatch.setattr(fuzz, "SHARES", (tokens,))
        assert fuzz.in_any_batch(case, kernels[0], torch.device(kernels[1])) == []


@on_gpu
@by(cases.ALL)
def test_token_is_the_same_in_a_batch_that_fills_the_device(subject, backend):
    """Alone and in parts of 7 to half of the tokens: the forward, as gradients of a boundary have two orders."""
    needs(backend)
    for T, D in ((4096, 4096), (16384, 1280), (1300, 7168), (4001, 1280), (16897, 256)):
        case = cases.Case(subject, (T,), 4, D, bf16)
        tensors = case.inputs("cuda")
        whole = accuracy.run(subject, tensors, backend) if case.runs_on(backend) else {}
        for rows in PARTS if whole else ():
            some = {name: t[rows] if name in fuzz.PER_TOKEN else t for name, t in tensors.items()}
            part = accuracy.run(subject, some, backend)
            assert [name for name in part if fuzz.differ(part[name], whole[name][rows])] == []


# Sizes of any op, and further ones of a boundary: its own kernel, and few tokens in one launch.
AGAIN = [(50, 4, 200, bf16), (4096, 4, 2560, bf16), (1500, 5, 512, fp16), (4096, 4, 256, fp32), (4096, 3, 257, bf16)]
LARGE_BOUNDARIES = ((8192, 4096), (3000, 7168), (16384, 1280), (1, 4096), (16, 7168), (64, 4096))
OF_BOUNDARIES = [(T, 4, D, bf16) for T, D in LARGE_BOUNDARIES]


@on_gpu
@by(MOST)
def test_same_bits_again_and_again(subject, backend, poisoned):
    """What a copy overwrites while it is still being read shows once in ten or a hundred runs of a full device. Each
    time over NaN, beside a copy that keeps the memory busy."""
    needs(backend)
    busy, large = torch.cuda.Stream(), torch.empty(64 * 2**20, device="cuda")
    for T, n, D, dtype in AGAIN + (OF_BOUNDARIES if "post_pre" in subject.name else []):
        case = cases.Case(subject, (T,), n, D, dtype)
        if not case.runs_on(backend):
            pytest.skip(f"{backend} does not have it")
        tensors = case.inputs("cuda")
        cotangents = cotangents_of(subject, tensors, backend)
        first = accuracy.run(subject, tensors, backend, cotangents)
        for _ in range(200):
            with torch.cuda.stream(busy):
                large.copy_(large)
            again = accuracy.run(subject, tensors, backend, cotangents)
            assert [name for name in first if not torch.equal(first[name], again[name])] == [], case
