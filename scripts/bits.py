#!/usr/bin/env python
"""Hashes every output and gradient of the cases of `mhc-ops check`, to compare before and after a change that must not
change results: scripts/bits.py [--backend NAME] [--device cuda] [--only SUBSTRING] [--part I/N] BITS.json,
then scripts/bits.py --compare BEFORE.json AFTER.json, which exits with 1 where a hash differs.

For Triton's kernels on a CPU: TRITON_INTERPRET=1 scripts/bits.py --backend triton BITS.json (an hour; --only, or
--largest ELEMENTS of x, takes less).
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from mhc_ops.core.backend import BACKENDS
from mhc_ops.measure import files, selection
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import runs


def hashes(case, backend: str, device: torch.device) -> dict[str, str]:
    results = accuracy.run_case(case, backend, device).results
    return {f"{case} {backend} {name}": _hash(tensor) for name, tensor in results.items()}


def _hash(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(content.view(torch.uint8).numpy().tobytes() if content.numel() else b"").hexdigest()[:16]


def record(options: argparse.Namespace) -> None:
    found: dict[str, str] = {}
    device = torch.device(options.device)
    first, of = map(int, options.part.split("/"))
    for backend in [options.backend] if options.backend else BACKENDS:
        for case in selection.CHECK[first::of]:
            small = next(iter(case.inputs().values())).numel() <= options.largest
            if options.only in str(case) and small and runs(case, backend, device):
                found |= hashes(case, backend, device)
                files.write(options.files[0], json.dumps(found, indent=1) + "\n")  # kept if the run is stopped
                print(f"\r{len(found)}", end="", file=sys.stderr, flush=True)
    print(f"\r{len(found)} hashes")


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    common = before.keys() & after.keys()
    differ = sorted(name for name in common if before[name] != after[name])
    for name in differ:
        print("differs:", name)
    print(f"{len(common)} in both, {len(differ)} differ, {len(before.keys() ^ after.keys())} in one only")
    return 1 if differ or not common else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    parser.add_argument("--largest", type=float, default=math.inf, metavar="ELEMENTS")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth case from the Ith, for N processes")
    options = parser.parse_args()
    if options.compare:
        before, after = map(files.read_json, options.files)
        return compare(before, after)
    record(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
