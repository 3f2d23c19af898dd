"""Compiling ahead: each kernel once, and what is said about it."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import torch

from mhc_ops.core import ahead, launch, native


class Kernel:
    """What `launch` takes, as Triton describes its kernels."""

    def __init__(self, name, *not_special):
        self.__name__, self.arg_names, self.compiled = name, ["x_ptr", "T", "BLOCK"], []
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name == "BLOCK", do_not_specialize=name in not_special)
            for name in self.arg_names
        ]

    def warmup(self, *values, grid, **options):
        self.compiled.append((values[1:], options))


def run(kernels, sizes):
    for kernel, T, BLOCK in product(kernels, sizes, (16, 32)):
        launch.launch(kernel, (T,), x_ptr=torch.zeros(4), T=T, BLOCK=BLOCK, num_warps=4)


def test_each_form_is_compiled_once(capsys, monkeypatch):
    """Triton compiles for 1, for multiples of 16 and for the rest, unless the kernel says that it need not. What
    replays calls is compiled too."""
    in_c = []
    monkeypatch.setattr(native, "compiled", lambda: in_c.append(None))
    same, special = Kernel("same_kernel", "T"), Kernel("special_kernel")
    work = partial(run, (same, special), (1, 2, 3, 16, 32))
    assert ahead.compile_ahead("warmup", work, torch.device("cpu"), verbose=True) == 2 + 6
    assert len(same.compiled) == 2 and sorted(T for (T, _), _ in special.compiled) == [1, 1, 3, 3, 32, 32]
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warmup: 8 kernels in ")
    assert err.endswith(" s: same_kernel ×2, special_kernel ×6\n")
    assert ahead.compile_ahead("warmup", work, torch.device("cpu"), verbose=False) == 8
    assert capsys.readouterr().err == "" and len(in_c) == 2
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    ahead.compile_ahead("warmup", work, torch.device("cpu"), verbose=True)
    assert "\rwarmup [############            ] 4/8" in capsys.readouterr().err


def test_sizes_have_the_kernels_of_their_neighbours():
    assert ahead.up_to(3) == [1, 2, 3]
    assert ahead.up_to(300) == [*range(1, 66), 128, 129, 256, 257, 300]
