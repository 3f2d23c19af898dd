"""Every config over its whole domain: sizes that the kernels take, within the memory and registers of the device."""

import itertools

import pytest
from config_domain import CHANNELS, DEVICES, STREAMS, is_power_of_2

pytest.importorskip("tilelang")
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.tilelang import configs
from mhc_ops.mhc.tilelang.build import ON_CPU, TYPES, vector

TOKENS = [*range(1, 300), *(2**power + off for power in range(9, 21) for off in (-1, 0, 1))]
REGISTERS = 65536  # of a multiprocessor
by_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)


def maps(n):
    """Rows of phi: in the head, and elsewhere."""
    return n, n * n + 2 * n


def check_threads(threads, on):
    assert threads == ON_CPU if on.kind == "cpu" else threads.lanes == 32 and 1 <= threads.groups <= 8


def check_block(block, on, tiles):
    assert is_power_of_2(block.threads) and block.threads % on.warp == 0
    assert block.resident >= 1 and block.loaders in (0, configs.LOADERS)
    assert block.loaders == 0 or on.capability == (9, 0)
    assert block.registers % 8 == 0 and configs.LOADER_REGISTERS <= block.registers <= 240
    held = block.threads * block.registers + block.loaders * configs.LOADER_REGISTERS
    assert block.resident * held <= REGISTERS
    assert on.kind == "cpu" or block.resident * tiles < on.shared_memory


@by_device
def test_streams_cover_a_row(on):
    for config in (configs.per_token, configs.per_group, configs.per_column):
        check_threads(config(on), on)
    for D, dtype, other in itertools.product(CHANNELS, TYPES, TYPES):
        threads, vectors = configs.stream.__wrapped__(on, D, dtype, other)
        width = vector(threads, D, dtype, other)
        check_threads(threads, on)
        assert vectors >= 1 and D % width == 0
        assert width in (1, 2, 4, 8)
        blocks = cdiv(D, threads.block * vectors * width)
        assert blocks == 1 or threads == ON_CPU or threads.groups > 4  # of the same size, and none of them small


def test_sides_of_products():
    """phi_order: each pair of parts whose order is kept stands once, part p of dh_mix beside part order[...] of phi."""
    assert [configs.phi_order(parts) for parts in (1, 2, 3)] == [(0,), (1, 0, 0), (2, 1, 0, 1, 0, 0)]
    for n, head in itertools.product(STREAMS, (False, True)):
        assert configs.factors(n, head) % 4 == 0
        assert 0 <= configs.factors(n, head) - (1 + n + (0 if head else n * n)) < 4
    for M in {M for n in STREAMS for M in maps(n)}:
        rows = configs.padded_maps(M)
        assert is_power_of_2(rows) and max(16, M) <= rows <= 128
        for parts in (1, 2, 3):
            columns = configs.mix_columns(M, parts)
            assert columns >= parts * rows
            assert columns in (16, 32) or columns % 64 == 0


@by_device
def test_products(on):
    for n, D, dtype in itertools.product(STREAMS, CHANNELS, TYPES):
        exact = configs.arithmetic(dtype, on)
        assert 1 <= exact.x_parts <= exact.parts <= 3
        for M in maps(n):
            config = configs.project.__wrapped__(M, n * D, dtype, on)
            check_block(config, on, config.tiles(M, dtype, exact))
            assert is_power_of_2(config.block_t, config.block_k) and config.block_t >= 32
            assert config.slice_k % config.block_k == 0
            assert config.stages == (2 if config.loaders else 1)
            slices = config.slices(n * D)
            assert 1 <= slices <= configs.MOST_SLICES
            assert (slices - 1) * config.slice_k < n * D <= slices * config.slice_k
            assert config.loaders == 0 or n * D % 8 == 0
            config = configs.dx.__wrapped__(n, D, M, dtype, on)
            check_block(config, on, config.tiles(n, M, dtype, exact))
            assert config.block_t in (16, 32, 64) and config.block_d in (16, 32)
            assert n % config.streams == 0
            assert config.loaders == 0 or D % 8 == 0


@by_device
def test_partition_rows(on):
    for n, dtype, T, D in itertools.product(STREAMS, TYPES, TOKENS, (1, 64, 4096)):
        config = configs.dx(n, D, maps(n)[1], dtype, on)
        steps, slices = configs.partition_rows.__wrapped__(T, n, D, config, on.processors)
        assert 1 <= slices <= configs.MOST_TOKEN_SLICES
        assert (slices - 1) * steps < cdiv(T, config.block_t) <= slices * steps
