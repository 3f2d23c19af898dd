"""The arithmetic of the launch plans, for many shapes: everything is covered once, and slices do not depend on T."""

import pytest

pytest.importorskip("triton")
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.triton import configs

WIDTHS = [1, 7, 64, 96, 160, 257, 512, 700, 1000, 1280, 2048, 2560, 3584, 4096, 5120, 7168, 8192, 12288]
TOKEN_BLOCKS = [1, 2, 3, 5, 16, 31, 64, 66, 100, 128, 132, 133, 256, 500, 10_000]


@pytest.mark.parametrize("n", range(1, 9))
def test_cut(n):
    M = configs.maps(n)
    for D in WIDTHS:
        K = n * D
        for block_k in (configs.project(M, K, False, "cuda").block_d, n * 32):
            steps = cdiv(K, block_k)
            shapes = set()
            for token_blocks in TOKEN_BLOCKS:
                cut = configs.cut(K, block_k, token_blocks, 132)
                shares = [min((p + 1) * cut.steps, steps) - p * cut.steps for p in range(cut.pieces)]
                assert min(shares) >= 1, "no program is idle"
                assert sum(shares) == steps, "each block is summed once"
                assert cut.steps % cut.slice_steps == 0, "a program starts with a slice"
                shapes.add((cut.slice_steps, cut.group_pieces * cut.steps))
            assert len(shapes) == 1, "slices and groups depend on n and D alone"


def test_few_tokens_fill_the_device():
    assert configs.cut(4 * 4096, 128, 1, 132).pieces == 32
    assert configs.cut(4 * 7168, 128, 2, 132).pieces == 32


def test_many_tokens_store_groups():
    for token_blocks in (64, 128, 1000):
        assert configs.cut(4 * 4096, 128, token_blocks, 132).pieces == 4


@pytest.mark.parametrize("T", [1, 31, 128, 4096, 8192, 140_000])
def test_token_slices(T):
    for n in range(1, 9):
        for D in WIDTHS:
            tile = configs.dx(n, D, False, True, "cuda")
            assert n % tile.streams == 0
            assert tile.streams.bit_count() == 1
            blocks = cdiv(D, tile.block_d) * (n // tile.streams)
            slices = configs.token_slices(T, configs.maps(n), blocks, tile, 132)
            assert 1 <= slices <= min(16, cdiv(T, tile.block_t))
