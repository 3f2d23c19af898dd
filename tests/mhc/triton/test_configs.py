"""Every config over all that can be asked for, and the arithmetic of the launch plans: everything is covered once."""

import itertools

import pytest
from config_domain import CHANNELS, DEVICES, GPUS, STREAMS, is_power_of_2
from mhc_kernels import bf16, fp16, fp32

pytest.importorskip("triton")
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.triton import configs

WIDTHS = [64, 96, 160, 257, 700, 1000, 1280, 2048, 2560, 3584, 4096, 5120, 7168, 8192, 12288, *CHANNELS[::7]]
HOPPER = GPUS["sm_90"]
SMALLEST_PRODUCT = 16  # side of a tile that goes to a matrix unit
TOKENS = [1, 31, 128, 1000, 4096, 8192, 140_000, 10**6]
TOKEN_BLOCKS = [1, 2, 3, 5, 16, 31, 64, 66, 100, 128, 132, 133, 256, 500, 10_000]
by_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)


@by_device
def test_plans(on):
    """How K, tokens and channels are divided among programs."""
    for n, D in itertools.product(STREAMS, WIDTHS):
        tile, channel_blocks = configs.dx(n, D, False, True, on), cdiv(D, configs.finish(D, on).block_d)
        blocks = cdiv(D, tile.block_d) * (n // tile.streams)
        for T in TOKENS:
            slices = configs.partition_rows(T, configs.maps(n), blocks, tile, on.processors)
            assert 1 <= slices <= min(16, cdiv(T, tile.block_t))
            assert 1 <= configs.channel_blocks_each(channel_blocks, cdiv(T, 2), on.processors) <= channel_blocks
        for block_d in {configs.project(configs.maps(n), D, False, on).block_d, 32}:
            steps = cdiv(D, block_d) * n
            shapes = set()
            for token_blocks in TOKEN_BLOCKS:
                split = configs.split_k(n, D, block_d, token_blocks, on.processors)
                assert min(vars(split).values()) >= 1
                last = steps - (split.pieces - 1) * split.steps
                assert 1 <= last <= split.steps, "no program is idle, and each block is summed once"
                assert split.steps % split.slice_steps == 0, "a program starts with a slice"
                assert split.bundle_steps % split.slice_steps == 0, "a bundle has whole slices"
                assert split.group_pieces % split.bundle_pieces == 0, "a group has whole bundles"
                in_bundle = split.bundle_pieces * split.steps
                assert in_bundle % split.bundle_steps == 0
                assert in_bundle == split.bundle_steps or split.bundle_pieces == 1
                shapes.add((split.slice_steps, split.bundle_steps, split.group_pieces * split.steps))
            assert len(shapes) == 1, "slices, bundles and groups depend on n and D alone"


def test_how_k_is_split():
    """Few tokens fill the device, some store bundles, many store groups; one launch takes few where it is faster."""
    pieces = {blocks: configs.split_k(4, 4096, 128, blocks, 132).pieces for blocks in (1, 64, 128, 1000)}
    assert pieces == {1: 32, 64: 4, 128: 4, 1000: 4}
    assert configs.split_k(4, 4096, 128, 16, 132) == configs.split_k_in_bundles(4, 4096)
    assert configs.few(4, 7168, 16, HOPPER).together and configs.few(4, 7168, 64, HOPPER) is None


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
    """The stages are slices of 128 channels, two to a bundle, as the projection's are on Hopper; bundles are pieces."""
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
    def taken(n=4, D=4096, T=8192, dtype=bf16, on=HOPPER):
        return configs.boundary_fwd(n, D, T, on), configs.boundary_bwd(n, D, dtype, T == 8192, on)

    assert taken() == (configs.BOUNDARY_FWD, configs.BOUNDARY_BWD)
    elsewhere = [taken(on=on) for on in DEVICES.values() if on is not HOPPER]
    other_sizes = [taken(n=n) for n in STREAMS if n != 4] + [taken(T=64), taken(D=4096 + 32)]
    assert {*elsewhere, *other_sizes} == {(None, None)}
    assert {taken(dtype=dtype)[1] for dtype in (fp16, fp32)} == {None}


@by_device
def test_tiles(on):
    for dtype in (bf16, fp16, fp32):
        exact = configs.arithmetic(dtype, on)
        assert exact.parts in (1, 2) and exact.precision in ("ieee", "tf32x3")
    for n, D, wide in itertools.product(STREAMS, CHANNELS, (False, True)):
        projects = [configs.project(M, D, wide, on) for M in (n, configs.maps(n))]  # of the head, of pre
        dx = [configs.dx(n, D, wide, residual, on) for residual in (False, True)]
        dx.append(configs.normed_dx(n, D, wide, on))
        own_sums = [configs.post_bwd(n, D, wide, mixed, on) for mixed in (False, True)]
        others = [configs.finish(D, on), configs.normed_read(n, D, on), configs.dh_pre(n, D, wide, on)]
        others += [configs.normed_dh_pre(n, D, on), configs.read_bwd(n, D, on), configs.post_fwd(n, D, wide, on)]
        for tile in (*projects, *dx, *own_sums, *others):
            assert is_power_of_2(tile.block_t, tile.block_d, tile.warps) and tile.stages >= 1
        for tile in projects:
            assert min(tile.block_t, tile.block_d) >= SMALLEST_PRODUCT
            assert configs.PADDED_K % tile.block_d == 0, "the last block of K reads past a row of phi in parts"
        for tile in dx:
            assert is_power_of_2(tile.streams) and n % tile.streams == 0
            assert min(tile.block_t, tile.block_d * tile.streams) >= SMALLEST_PRODUCT
        assert min(tile.block_d for tile in own_sums) >= 8, "own_sums adds 8 channels of a thread"
    for n in STREAMS:
        for tile in (configs.sinkhorn(n, on), configs.dmaps(n, on), configs.dmaps(n, on, without_eps=True)):
            assert is_power_of_2(tile.block_t, tile.warps)
        for M in (n, configs.maps(n)):
            assert configs.padded_maps(M) >= M
            for tile in (configs.phi_parts(M), configs.sums(M, on)):
                assert is_power_of_2(tile.block_d, tile.warps) and configs.PADDED_K % tile.block_d == 0
            assert is_power_of_2(configs.sums(M, on).block_t)
