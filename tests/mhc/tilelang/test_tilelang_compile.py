"""What the TileLang launchers launch lowers for NVIDIA and AMD GPUs, and nvcc compiles it without spills."""

import re

import pytest
import torch

pytest.importorskip("tilelang")
from stale_values import stale_values
from tilelang_targets import DEVICES, PRODUCTS, Product, distinct_products, launched, lower, nvcc, resources

from mhc_ops.core.device import Device
from mhc_ops.mhc.tilelang import configs
from mhc_ops.mhc.tilelang.pre_dx import Residual
from mhc_ops.testing import cases

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="there is no nvcc to compile with")
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


def compiled_products(target):
    """Every config of Hopper (wgmma), of sm_80 (the plain loops of the other NVIDIA GPUs, with mma) and of gfx942; of
    GPUs that have no others than those, the largest."""
    found = distinct_products(target)
    if target in ("sm_90a", "sm_80", "gfx942"):
        return list(found.values())
    by_size = sorted(found.values(), key=lambda product: product.tiles(DEVICES[target]))
    return list({product.kernel: product for product in by_size}.values())


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


def by_target(chosen, *targets):
    pairs = [(target, item) for target in targets for item in chosen(target)]
    return pytest.mark.parametrize(("target", "item"), pairs, ids=[f"{target}-{item}" for target, item in pairs])


def others(case, target):
    """The kernels of a case that the tests of products do not compile."""
    functions = launched(case, DEVICES[target])
    return [function for function in functions if function.attrs["global_symbol"] not in PRODUCTS]


@needs_nvcc
@by_target(CASES.get, "sm_90a", "sm_80")
def test_kernels_compile_without_spills(target, item):
    for registers, spills in resources(lowered(others(item, target), target), target):
        assert spills == 0, registers


@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_no_kernel_cuts_a_product_of_gamma(target):
    """Where it did, nvcc and hipcc would choose whether the product is rounded before a part is subtracted from it."""
    case = cases.Case(cases.MHC_PRE, (9,), 4, 64, bf16)
    sources = {kernel.kernel: kernel.source for kernel in (lower(f, target) for f in launched(case, DEVICES[target]))}
    assert {name for name, source in sources.items() if "gamma" in source} == {"mhc_pre_dphi"}
    assert re.findall(r"(\w+)\[.*\] = .*\bweight\[0\] \*", sources["mhc_pre_dphi"]) == ["dphi"]


@by_target(CASES.get, "gfx942")
def test_kernels_lower_for_amd(target, item):
    lowered(others(item, target), target)


@needs_nvcc
@pytest.mark.parametrize(("target", "part"), [("sm_90a", 0), ("sm_90a", 1), ("sm_80", 0), ("sm_120a", 1)])
def test_products_compile_without_spills(target, part):
    """All on Hopper; each half on one of the others: nvcc takes seconds for a product."""
    products = compiled_products(target)[part::2]
    kernels = lowered([product.function(DEVICES[target]) for product in products], target)
    for product, kernel, (_, spills) in zip(products, kernels, resources(kernels, target) if kernels else ()):
        assert kernel.shared <= product.tiles(DEVICES[target]) + configs.KEPT, product
        assert spills == 0, product


@by_target(compiled_products, "gfx942", "gfx950")
def test_products_lower_for_amd(target, item):
    (kernel,) = lowered([item.function(DEVICES[target])], target)
    assert kernel.shared <= item.tiles(DEVICES[target]) + configs.KEPT


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("n", "dtype"), [(8, "float32"), (1, "float32"), (2, "float16")])
def test_gradients_of_maps_alone(n, dtype, target):
    """Without dh_in and dx_next, threads take other elements of x: for n = 1 and 8, fp32 once summed it three times."""
    product = Product("mhc_pre_dx", n, 64, dtype, dh_in=False, residual=Residual.NONE)
    lowered([product.function(DEVICES[target])], target)


def test_stale_values_are_found():
    """What TileLang makes of a value that is cast, overwritten and cast again."""
    read = ["float own[4];", "float4 v_ = *(float4*)(own + 0);", "__1.x = (v_.x);"]
    assert stale_values("\n".join(read)) == []
    assert len(stale_values("\n".join([*read, "*(float4*)(own + 0) = __1;", "__2.x = (v_.x);"]))) == 1
    loop = ["for (int i = 0; i < 2; ++i) {", "  __2.x = (v_.x);", "  *(float4*)(own + 0) = __2;", "}"]
    assert len(stale_values("\n".join([*read, *loop]))) == 1


def test_what_does_not_fit_says_so():
    reason = "tilelang: the gradients of 8 streams in float32 do not fit the 48 KB of shared memory of this GPU"
    with pytest.raises(NotImplementedError, match=reason):
        launched(cases.Case(cases.MHC_PRE, (3,), 8, 16, fp32), Device("cuda", (8, 0), shared_memory=48 << 10))
