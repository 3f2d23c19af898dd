"""Over what configs are called in tests: every width up to 1,024, then powers of two and their neighbours."""

from mhc_ops.core.device import Device

KB = 1024
# One GPU of each kind, by what Triton compiles for: RTX 30, 40 and 50 and L40S have 99 KB of shared memory a program.
GPUS = {
    "sm_80": Device("cuda", (8, 0), 163 * KB, 108, 32),
    "sm_86": Device("cuda", (8, 6), 99 * KB, 84, 32),
    "sm_89": Device("cuda", (8, 9), 99 * KB, 142, 32),
    "sm_90": Device("cuda", (9, 0), 227 * KB, 132, 32),
    "sm_100": Device("cuda", (10, 0), 227 * KB, 148, 32),
    "sm_120": Device("cuda", (12, 0), 99 * KB, 170, 32),
    "gfx942": Device("hip", (9, 4), 64 * KB, 304, 64),
    "gfx950": Device("hip", (9, 5), 160 * KB, 256, 64),
}
# And what is not compiled for: GPUs newer than the table, a small one, one with warps of 32 from AMD, the interpreter.
DEVICES = {
    **GPUS,
    "sm_103": Device("cuda", (10, 3), 227 * KB, 152, 32),
    "sm_121": Device("cuda", (12, 1), 99 * KB, 48, 32),
    "gfx1100": Device("hip", (11, 0), 64 * KB, 96, 32),
    "interpreter": Device("cpu"),
}
STREAMS = range(1, 9)
CHANNELS = [*range(1, 1025), *(2**power + more for power in range(11, 16) for more in (-1, 0, 1))]


def is_power_of_2(*values):
    return all(isinstance(value, int) and value > 0 and value & (value - 1) == 0 for value in values)
