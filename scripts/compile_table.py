#!/usr/bin/env python3
"""Compile every Triton kernel, in every config, for every GPU of the table, and print what each takes, as Markdown.

    python scripts/compile_table.py [--targets sm_80 gfx942 ...] [--jobs 8] > docs/gpus.md

No GPU is needed. Exits with 1 where a kernel fails to compile, spills, or takes more shared memory than the GPU has.
`./run_tests.sh` compiles more configs for fewer GPUs. The table takes a quarter of an hour on two cores.
"""

import argparse
import itertools
import multiprocessing
import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS / "helpers"), str(TESTS / "mhc/triton"), str(TESTS / "conv/triton")]

import pytest
import test_compile
import test_conv_compile
import torch
import triton
from config_domain import GPUS
from cross_compile import Compiled, compiling_for

import mhc_ops

TOKENS = 8192
bf16, fp32 = torch.bfloat16, torch.float32
MHC = [
    *itertools.product((1, 4, 8), (4096,), (bf16,)),
    *itertools.product((4, 8), (1280,), (fp32,)),
    (4, 257, bf16),
    *((n, 4096, bf16, True, True) for n in (1, 4, 8)),  # with the layer's norm
    (4, 1280, fp32, True, True),
    *((n, 4096, bf16, True, True, False, False, True) for n in (4, 8)),  # shifted, the identity as residual
    (4, 4096, bf16, True, True, True, True, True),  # shifted, transposed
]
CONV = [
    *itertools.product((4096,), (4,), (bf16,), ("", "cu_seqlens states")),
    (4097, 7, fp32, ""),
]
TILELANG = """
TileLang's two kernels with matrix products are compiled by nvcc for sm_80, sm_90a and sm_120 in the tests, without
spills, and lowered to HIP source for gfx942 and gfx950 (`tests/mhc/tilelang/`)."""
FAMILIES = {  # what launches, its configs, and the names of the kernels if not all
    "mhc": (partial(test_compile.launch_all, TOKENS), MHC, None),
    "conv": (partial(test_conv_compile.launch_all, TOKENS), CONV, None),
    "serving": (test_conv_compile.warm_up, [(4096, 4, bf16)], test_conv_compile.SERVING),
}
Item = tuple[str, str, tuple]


def compiled(item: Item) -> tuple[Item, list[Compiled] | str]:
    """The kernels that a family's launchers start for one config on one target, or why that failed."""
    target, family, config = item
    torch.set_num_threads(1)
    launch, _, names = FAMILIES[family]
    with pytest.MonkeyPatch.context() as patch, compiling_for(target, patch, names) as kernels:
        try:
            launch(*config)
        except Exception as error:
            return item, f"{type(error).__name__}: {error}".splitlines()[0]
    return item, kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    items = [(t, family, c) for t in options.targets for family, (_, cs, _) in FAMILIES.items() for c in cs]
    largest: dict[tuple[str, str], tuple[int, int, int]] = {}
    problems = []
    with multiprocessing.Pool(options.jobs) as pool:
        for done, ((target, family, config), kernels) in enumerate(pool.imap_unordered(compiled, items), start=1):
            print(f"\r{done}/{len(items)}", end="", file=sys.stderr, flush=True)
            words = f"{target}: {family} {' '.join(str(c).removeprefix('torch.') for c in config)}"
            if isinstance(kernels, str):
                problems.append(f"{words}: {kernels}")
                continue
            for kernel in kernels:
                at, takes = (kernel.name, target), (kernel.registers, kernel.shared, kernel.spilled)
                largest[at] = tuple(map(max, largest.get(at, (0, 0, 0)), takes))
                if kernel.spilled or kernel.shared > GPUS[target].shared_memory:
                    problems.append(f"{words}: {kernel.name} {takes}")
    print(file=sys.stderr)
    print(page(options.targets, largest, sorted(set(problems)), len(items)))
    return 1 if problems else 0


def page(
    targets: list[str], largest: dict[tuple[str, str], tuple[int, int, int]], problems: list[str], count: int
) -> str:
    versions = f"mhc_ops {mhc_ops.__version__}, triton {triton.__version__}"
    lines = [
        "# What the Triton kernels take on each GPU",
        "",
        f"Made by `scripts/compile_table.py` with {versions}: every kernel compiled, without the GPU, in",
        f"{count // len(targets)} choices of n, D, width, type and options. A cell has registers per thread / KB of",
        "shared memory per program, each the largest of all choices; – where the GPU does not use the kernel. The",
        "first row is what the GPU has. Kernels were run on an H200 (sm_90) alone.",
        "",
        "| kernel | " + " | ".join(targets) + " |",
        "| --- |" + " --- |" * len(targets),
        "| (the GPU) | "
        + " | ".join(f"{limit(target)} / {GPUS[target].shared_memory // 1024}" for target in targets)
        + " |",
    ]
    for name in dict.fromkeys(kernel for kernel, _ in sorted(largest)):
        cells = []
        for target in targets:
            registers, shared, spilled = largest.get((name, target), (0, 0, 0))
            spills = f", spills {spilled} B" if spilled else ""
            cells.append(f"{registers} / {shared / 1024:.0f}{spills}" if registers else "–")
        lines.append(f"| {name.removesuffix('_kernel')} | " + " | ".join(cells) + " |")
    ending = [f"- {problem}" for problem in problems] or [
        "No kernel spills, and each fits the shared memory of its GPU."
    ]
    return "\n".join([*lines, "", *ending, TILELANG])


def limit(target: str) -> int:
    """Registers that one thread can have."""
    return 512 if GPUS[target].kind == "hip" else 255


if __name__ == "__main__":
    sys.exit(main())
