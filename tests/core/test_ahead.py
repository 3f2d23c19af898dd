"""Compiling ahead: each kernel once, and what is said about it."""

import ast
import gc
import sys
from functools import partial
from itertools import product
from pathlib import Path
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


def test_syntax_trees_of_several_threads(monkeypatch):
    """Python 3.11.0 to 3.11.7 cannot make them at once where garbage is collected."""
    kernels = [Kernel(f"kernel_{i}", "T") for i in range(4)]
    source = Path(ast.__file__).read_text(encoding="utf-8")
    monkeypatch.setattr(Kernel, "warmup", lambda self, *values, **options: [ast.parse(source) for _ in range(4)])
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(within := lambda *_: sum(range(200)))  # in which another thread may go on
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        assert ahead.compile_ahead("warmup", partial(run, kernels, (1,)), torch.device("cpu"), verbose=False) == 8
    finally:
        gc.callbacks.remove(within)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)


def test_sizes_have_the_kernels_of_their_neighbours():
    assert ahead.up_to(3) == [1, 2, 3]
    assert ahead.up_to(300) == [*range(1, 66), 128, 129, 256, 257, 300]
