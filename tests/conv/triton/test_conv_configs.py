"""Every config of the convolution's kernels, over all that can be asked for: sizes that the kernels accept."""

import itertools

import pytest
from config_domain import CHANNELS, DEVICES, is_power_of_2

pytest.importorskip("triton")
from mhc_ops.conv.triton import configs

WIDTHS = range(1, 9)
ROWS = [1, 10**6]  # tokens of all sequences
march = configs.march.__wrapped__  # not kept
by_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)


@by_device
@pytest.mark.parametrize("kernel", configs.Kernel, ids=lambda kernel: kernel.name.lower())
def test_march(kernel, on):
    chosen = {
        (march(kernel=kernel, rows=rows, D=D, W=W, itemsize=itemsize, aligned=aligned, on=on), W)
        for D, W, itemsize, rows in itertools.product(CHANNELS, WIDTHS, (2, 4), ROWS)
        for aligned in {False, D % 16 == 0}
    }
    for config, W in chosen:
        assert is_power_of_2(config.block_d, config.rows, config.step, config.warps), config
        assert config.step >= W - 1 or kernel in configs.WITH_STATES, "taps reach back into one step"
        assert config.rows % config.step == 0
        assert config.block_d <= 4096
        assert config.warps <= 4
        assert config.stages >= 1


@by_device
def test_small_kernels(on):
    assert is_power_of_2(configs.UPDATE_WARPS)
    for D in CHANNELS:
        block_d = configs.channels(D, on)
        assert is_power_of_2(block_d)
        assert min(D, 32) <= block_d <= 4096
        tile = configs.inv_rms(D, on)
        assert is_power_of_2(tile.block_d, tile.rows, tile.warps)
    for tile in (configs.sums(on), configs.ADD_DOTS):
        assert is_power_of_2(tile.rows, tile.warps)
    assert is_power_of_2(configs.sums(on).block_d)


@by_device
def test_rows_each(on):
    for rows in range(1, 10_000, 7):
        for most in configs.MOST_ROWS.values():
            each = configs.rows_each(rows, most=most, processors=on.processors)
            assert is_power_of_2(each)
            assert 16 <= each <= most
