"""gamma·phi is rounded once, in the code that every kernel is compiled to, so that a token has the same bits in all."""

import re

import pytest

from mhc_ops.core.backend import _INTERPRETED

pytest.importorskip("triton")
from config_domain import GPUS
from mhc_kernels import bf16, fp32
from mhc_launches import compiled

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")

READERS = {"phi_parts_kernel", "mhc_pre_project_kernel", "mhc_few_fwd_kernel", "mhc_pre_sums_kernel"}  # of gamma
FORWARD = READERS - {"mhc_pre_sums_kernel"}  # which also adds up products with gamma, for dgamma
by_target = pytest.mark.parametrize("target", ["sm_90", "gfx942", "sm_80", "sm_100", "sm_120", "gfx950"])
# .rn forbids ptxas to contract; what stands between these marks is not LLVM's to change.
ROUNDED = {"cuda": r"\bmul\.rn\.f32\b", "hip": r"ASMSTART\s+v_mul_f32\b.*\s+;;#ASMEND"}
STATEMENT = re.compile(r"^\s*(?:(%\w+)(?::\d+)? = )?\"?([\w.]+)\"?(.*)$")
UNCHANGED = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extf", "arith.select")


def plain_products(ttir, pointer):
    """Products of what is loaded from a pointer that a compiler may contract, and that are not just stored."""
    addresses, values, products, wrong = {pointer}, set(), set(), []
    for line in ttir.splitlines():
        found = STATEMENT.match(re.sub(r"loc\(.*", "", line))
        result, operation, rest = found.groups() if found else (None, "", "")
        operands = set(re.findall(r"%\w+", rest))
        if operation in ("tt.addptr", *UNCHANGED) and operands & addresses:
            addresses.add(result)
        elif operation == "tt.load" and operands & addresses:
            values.add(result)
        elif operation in UNCHANGED:
            values |= {result} if operands & values else set()
            products |= {result} if operands & products else set()
        elif operation == "arith.mulf" and operands & values:
            products.add(result)
        elif operands & products and operation != "tt.store":
            wrong.append(line.strip())
    return wrong


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@by_target
def test_products_of_gamma_are_rounded(target, dtype, monkeypatch):
    kind = GPUS[target].kind
    launch = {"T": 8192, "n": 4, "D": 4096, "dtype": dtype, "ops": {"mhc_pre_fwd", "mhc_pre_bwd"}}
    kernels = compiled(target, monkeypatch, launch, kernels=READERS)
    reading = [kernel for kernel in kernels if len(re.findall(r"%gamma_ptr\b", kernel.ttir)) > 1]
    elsewhere = {"mhc_few_fwd_kernel"} if kind == "hip" or dtype == fp32 else set()
    assert {kernel.name for kernel in reading} == READERS - elsewhere
    for kernel in reading:
        assert plain_products(kernel.ttir, "%gamma_ptr") == [], kernel.name
        if kernel.name in FORWARD or dtype == bf16:  # in one part nothing is cut after the forward
            assert re.search(ROUNDED[kind], kernel.assembly), f"{kernel.name} has no rounded product"
