"""Every config over all that can be asked for, and the arithmetic of the launch plans: everything is covered once."""

import itertools

import pytest
import torch
from config_domain import CHANNELS, DEVICES, GPUS, STREAMS, is_power_of_2

pytest.importorskip("triton")
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.triton import configs

WIDTHS = [1, 7, 64, 96, 160, 257, 512, 700, 1000, 1280, 2048, 2560, 3584, 4096, 5120, 7168, 8192, 12288]
HOPPER = GPUS["sm_90"]
SMALLEST_PRODUCT = 16  # side of a tile that goes to a matrix unit
by_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
TOKEN_BLOCKS = [1, 2, 3, 5, 16, 31, 64, 66, 100, 128, 132, 133, 256, 500, 10_000]


@pytest.mark.parametrize("n", range(1, 9))
def test_cut(n):
    M = configs.maps(n)
    for D in WIDTHS:
        for block_d in (configs.project(M, D, False, HOPPER).block_d, 32):
            steps = cdiv(D, block_d) * n
            shapes = set()
            for token_blocks in TOKEN_BLOCKS:
                split = configs.split_k(n, D, block_d, token_blocks, 132)
                shares = [min((p + 1) * split.steps, steps) - p * split.steps for p in range(split.pieces)]
                assert min(shares) >= 1, "no program is idle"
                assert sum(shares) == steps, "each block is summed once"
                assert split.steps % split.slice_steps == 0, "a program starts with a slice"
                assert split.bundle_steps % split.slice_steps == 0, "a bundle has whole slices"
                assert split.group_pieces % split.bundle_pieces == 0, "a group has whole bundles"
                in_bundle = split.bundle_pieces * split.steps
                assert in_bundle == split.bundle_steps or (
                    split.bundle_pieces == 1 and in_bundle % split.bundle_steps == 0
                )
                shapes.add((split.slice_steps, split.bundle_steps, split.group_pieces * split.steps))
            assert len(shapes) == 1, "slices, bundles and groups depend on n and D alone"


def test_how_k_is_split():
    """Few tokens fill the device, some store bundles, many store groups; one launch takes few where it is faster."""
    assert configs.split_k(4, 4096, 128, 1, 132).pieces == 32
    assert configs.split_k(4, 7168, 128, 2, 132).pieces == 56
    assert configs.split_k(4, 4096, 128, 16, 132) == configs.split_k_in_bundles(4, 4096)
    assert [configs.split_k(4, 4096, 128, blocks, 132).pieces for blocks in (64, 128, 1000)] == [4] * 3
    assert configs.few(4, 7168, 16, HOPPER).together
    assert configs.few(4, 7168, 64, HOPPER) is None


@by_device
def test_few_tokens_are_taken_by_programs_that_run_at_once(on):
    """Those that wait for one another do run at once, and there are enough of them to finish all tokens."""
    taken = 0
    for n, D, T in itertools.product(STREAMS, CHANNELS, (1, 2, 5, 16, 17, 33, 64)):
        tile = configs.few(n, D, T, on)
        assert tile is None or on.kind == "cpu" or tile.tokens <= tile.block_t, "one product has all tokens"
        if tile is None or not tile.together:
            continue
        taken += 1
        pieces = configs.split_k_few(n, D, on).pieces
        assert cdiv(T, tile.tokens) * pieces <= on.processors
        assert tile.tokens % tile.finished == 0 and 2 * tile.tokens // tile.finished <= pieces
    assert on is not HOPPER or taken > 1000


def test_boundary_fwd():
    """Its stages are slices of 128 channels, two to a bundle, as the projection's are on Hopper; bundles are pieces."""
    tile = configs.BOUNDARY_FWD
    assert 2 * tile.block_d == configs.BUNDLE
    for D in CHANNELS:
        if configs.boundary_fwd(4, D, 10**6, HOPPER) is None:
            assert D % configs.BUNDLE or D > 8192
            continue
        assert configs.project(configs.maps(4), D, False, HOPPER).block_d == tile.block_d
        split = configs.split_k_in_bundles(4, D)
        assert (split.slice_steps, split.bundle_steps, split.steps) == (4, 8, 8)
        assert (split.pieces, split.bundle_pieces) == (D // configs.BUNDLE, 1)


def test_boundaries_are_for_hopper_with_many_tokens():
    def taken(n=4, D=4096, T=8192, dtype=torch.bfloat16, on=HOPPER):
        return configs.boundary_fwd(n, D, T, on), configs.boundary_bwd(n, D, dtype, T == 8192, on)

    assert taken() == (configs.BOUNDARY_FWD, configs.BOUNDARY_BWD)
    assert taken(D=64)[1] == configs.BOUNDARY_BWD
    elsewhere = [taken(on=on) for on in DEVICES.values() if on is not HOPPER]
    other_sizes = [taken(n=n) for n in STREAMS if n != 4] + [taken(T=64), taken(D=4096 + 32)]
    assert {*elsewhere, *other_sizes} == {(None, None)}
    assert {taken(dtype=dtype)[1] for dtype in (torch.float16, torch.float32)} == {None}


@pytest.mark.parametrize("T", [1, 31, 128, 4096, 8192, 140_000])
def test_partition_rows(T):
    for n in range(1, 9):
        for D in WIDTHS:
            tile = configs.dx(n, D, False, True, HOPPER)
            assert n % tile.streams == 0
            assert tile.streams.bit_count() == 1
            blocks = cdiv(D, tile.block_d) * (n // tile.streams)
            slices = configs.partition_rows(T, configs.maps(n), blocks, tile, 132)
            assert 1 <= slices <= min(16, cdiv(T, tile.block_t))


@by_device
def test_products(on):
    """The kernels with a matrix product."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        exact = configs.arithmetic(dtype, on)
        assert exact.parts in (1, 2)
        assert exact.precision in ("ieee", "tf32x3")
    for n, D, wide in itertools.product(STREAMS, CHANNELS, (False, True)):
        for M in (n, configs.maps(n)):  # of the head, of pre
            tile = configs.project(M, D, wide, on)
            assert is_power_of_2(tile.block_t, tile.block_d, tile.warps)
            assert min(tile.block_t, tile.block_d) >= SMALLEST_PRODUCT
            assert configs.PADDED_K % tile.block_d == 0, "the last block of K reads past a row of phi in parts"
            assert tile.stages >= 1
        plain = [configs.dx(n, D, wide, residual, on) for residual in (False, True)]
        for tile in (*plain, configs.normed_dx(n, D, wide, on)):
            assert is_power_of_2(tile.block_t, tile.block_d, tile.warps, tile.streams)
            assert n % tile.streams == 0
            assert min(tile.block_t, tile.block_d * tile.streams) >= SMALLEST_PRODUCT
            assert tile.stages >= 1


@by_device
def test_row_by_row_kernels(on):
    """Those without a product."""
    for n, D, wide in itertools.product(STREAMS, CHANNELS, (False, True)):
        tiles = (
            configs.finish(D, on),
            configs.normed_read(n, D, on),
            configs.dh_pre(n, D, wide, on),
            configs.normed_dh_pre(n, D, on),
            configs.read_bwd(n, D, on),
            configs.post_fwd(n, D, wide, on),
            *(configs.post_bwd(n, D, wide, mixed, on) for mixed in (False, True)),
        )
        for tile in tiles:
            assert is_power_of_2(tile.block_t, tile.block_d, tile.warps)
            assert tile.stages >= 1
        assert configs.post_bwd(n, D, wide, True, on).block_d >= 8, "own_sums adds 8 channels of a thread"
    for n in STREAMS:
        for tile in (configs.sinkhorn(n, on), configs.dmaps(n, on)):
            assert is_power_of_2(tile.block_t, tile.warps)
        for M in (n, configs.maps(n)):
            assert configs.padded_maps(M) >= M
            for tile in (configs.phi_parts(M), configs.sums(M, on)):
                assert is_power_of_2(tile.block_d, tile.warps)
                assert configs.PADDED_K % tile.block_d == 0
            assert is_power_of_2(configs.sums(M, on).block_t)


@by_device
def test_plans(on):
    """How often a kernel is started, for every width and many token counts."""
    for n, D in itertools.product(STREAMS, CHANNELS[::7]):
        M, tile = configs.maps(n), configs.dx(n, D, False, True, on)
        block_d = configs.project(M, D, False, on).block_d
        for T in (1, 16, 1000, 10**6):
            split = configs.split_k(n, D, block_d, cdiv(T, 64), on.processors)
            assert min(split.slice_steps, split.steps, split.pieces, split.bundle_pieces, split.group_pieces) >= 1
            blocks = cdiv(D, tile.block_d) * (n // tile.streams)
            assert configs.partition_rows(T, M, blocks, tile, on.processors) >= 1
            channel_blocks = cdiv(D, configs.finish(D, on).block_d)
            assert 1 <= configs.channel_blocks_each(channel_blocks, cdiv(T, 2), on.processors) <= channel_blocks
