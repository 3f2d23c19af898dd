"""What the TileLang launchers launch lowers for NVIDIA and AMD GPUs, and nvcc compiles it without spills."""

import re

import pytest

pytest.importorskip("tilelang")
from mhc_kernels import bf16, fp16, fp32
from stale_values import stale_values
from tilelang_targets import DEVICES, PRODUCTS, assert_no_spills, distinct_products, launched, lower, name_of, nvcc

from mhc_ops.core.device import Device
from mhc_ops.mhc.tilelang import configs
from mhc_ops.testing import cases

CASES = {
    "sm_90a": (
        cases.Case(cases.MHC_LAYER, (70,), 4, 4096, bf16),
        cases.Case(cases.MHC_LAYER, (70,), 8, 64, fp32),
        cases.Case(cases.MHC_HEAD, (70,), 5, 40, bf16),
        cases.Case(cases.SINKHORN, (70,), 8, 0, bf16),
        cases.Case(cases.SINKHORN.with_options(eps=0.0), (70,), 4, 0, bf16),
    ),
    "sm_80": (cases.Case(cases.MHC_POST_PRE, (70,), 3, 257, fp16, gamma=False),),
    "gfx942": (
        cases.Case(cases.MHC_POST_PRE, (70,), 4, 264, bf16, gamma=False),
        cases.Case(cases.MHC_HEAD, (70,), 5, 40, fp32),
        cases.Case(cases.SINKHORN, (70,), 8, 0, fp16),
    ),
}


def lowered(functions, target):
    """Their sources: they fit the shared memory of their GPU, add no floats atomically, use no value out of date."""
    kernels = [lower(function, target) for function in functions]
    for kernel in kernels:
        assert kernel.shared <= DEVICES[target].shared_memory, kernel.kernel
        assert "__global__" in kernel.source
        assert "atomicAdd" not in kernel.source
        assert stale_values(kernel.source) == []
        assert target == "sm_90a" or "wgmma" not in kernel.source.split('extern "C"', 1)[1]
    return kernels


def compiled(kernels, target):
    """nvcc compiles them without spills."""
    if DEVICES[target].kind == "cuda":
        if nvcc() is None:
            pytest.skip("there is no nvcc to compile with")
        assert_no_spills(kernels, target)


@pytest.mark.parametrize(("target", "case"), [(target, case) for target in CASES for case in CASES[target]], ids=str)
def test_kernels_compile(target, case):
    """Every kernel compiles but for those that the tests of products compile."""
    functions = launched(case, DEVICES[target])
    compiled(lowered([function for function in functions if name_of(function) not in PRODUCTS], target), target)


HALVES = [*((target, part) for target in ("sm_90a", "gfx942", "gfx950") for part in (0, 1))]
HALVES += [("sm_80", 0), ("sm_120a", 1)]  # one: nvcc takes seconds for a product


@pytest.mark.parametrize(("target", "part"), HALVES)
def test_products_compile(target, part):
    """Every config of Hopper (wgmma), of sm_80 (the plain loops of the other NVIDIA GPUs, with mma) and of gfx942; of
    GPUs that have no others than those, the largest."""
    products = sorted(distinct_products(target), key=lambda product: product.tiles)
    if target not in ("sm_90a", "sm_80", "gfx942"):
        products = list({product.kernel: product for product in products}.values())
    kernels = lowered([product.function(DEVICES[target]) for product in products[part::2]], target)
    for product, kernel in zip(products[part::2], kernels, strict=True):
        assert kernel.shared <= product.tiles + configs.KEPT, product
    compiled(kernels, target)


@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_no_kernel_cuts_a_product_of_gamma(target):
    """Where it did, nvcc and hipcc would choose whether the product is rounded before a part is subtracted from it."""
    case = cases.Case(cases.MHC_PRE, (9,), 4, 64, bf16)
    sources = {kernel.kernel: kernel.source for kernel in (lower(f, target) for f in launched(case, DEVICES[target]))}
    assert {name for name, source in sources.items() if "gamma" in source} == {"mhc_pre_dphi"}
    assert re.findall(r"(\w+)\[.*\] = .*\bweight\[0\] \*", sources["mhc_pre_dphi"]) == ["dphi"]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("n", "dtype"), [(8, fp32), (1, fp32), (2, fp16)], ids=str)
def test_gradients_of_maps_alone(n, dtype, target):
    """Without dh_in and dx_next, threads take other elements of x: for n = 1 and 8, fp32 once summed it three times."""
    case = cases.Case(cases.MHC_PRE, (9,), n, 64, dtype, unused=("h_in",))
    functions = launched(case, DEVICES[target])
    assert "mhc_pre_dh_pre" not in map(name_of, functions)
    lowered([function for function in functions if name_of(function) == "mhc_pre_dx"], target)


def test_what_does_not_fit_says_so():
    reason = "tilelang: the gradients of 8 streams in float32 do not fit the 48 KB of shared memory of this GPU"
    with pytest.raises(NotImplementedError, match=reason):
        launched(cases.Case(cases.MHC_PRE, (3,), 8, 16, fp32), Device("cuda", (8, 0), shared_memory=48 << 10))
