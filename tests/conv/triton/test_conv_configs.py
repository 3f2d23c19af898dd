"""Every config of the convolution's kernels, over all that can be asked for: sizes that the kernels accept."""

import itertools

import pytest
from config_domain import CHANNELS, DEVICES, is_power_of_2

pytest.importorskip("triton")
from mhc_ops.conv.triton import configs

WIDTHS = (1, 4, 5, 6, 7, 8)  # `march` asks whether W is more than 4, 5 and 6
ROWS = [1, 10**6]  # tokens of all sequences
march = configs.march.__wrapped__  # not kept
by_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)


@by_device
def test_march(on):
    for kernel in configs.Kernel:
        chosen = {
            (march(kernel=kernel, rows=rows, D=D, W=W, itemsize=itemsize, aligned=aligned, on=on), W)
            for D, W, itemsize, rows in itertools.product(CHANNELS, WIDTHS, (2, 4), ROWS)
            for aligned in {False, D % 16 == 0}
        }
        for config, W in chosen:
            assert is_power_of_2(config.block_d, config.rows, config.step, config.warps), config
            assert config.step >= W - 1 or kernel in configs.WITH_STATES, "taps reach back into one step"
            assert config.rows % config.step == 0, config
            assert config.block_d <= 4096 and config.warps <= 4 and config.stages >= 1, config


@by_device
def test_small_kernels(on):
    for D in CHANNELS:
        block_d, tile = configs.channels(D, on), configs.inv_rms(D, on)
        assert is_power_of_2(block_d, tile.block_d, tile.rows, tile.warps) and min(D, 32) <= block_d <= 4096
    sums, dots = configs.sums(on), configs.ADD_DOTS
    assert is_power_of_2(configs.UPDATE_WARPS, sums.rows, sums.warps, sums.block_d, dots.rows, dots.warps)
    for rows, most in itertools.product(range(1, 10_000, 7), configs.MOST_ROWS.values()):
        each = configs.rows_each(rows, most=most, processors=on.processors)
        assert is_power_of_2(each) and 16 <= each <= most
