"""mhc_ops.compat.megatron against the equations of Megatron-Core's dev branch, and in the place of its functions."""

import sys
from types import SimpleNamespace

import pytest
import torch
from compat_oracle import BF16, FP32, assert_near, gradients, in_fp64, inverse_rms, logits, read, says, sinkhorn, write

from mhc_ops.compat import megatron

FILE = "megatron/core/fusions/fused_mhc_kernels.py"
EPS = 1e-6
S, B, N, C = 5, 2, 4, 24
M, K = N * N + 2 * N, N * C


def draw(scale=1.0):
    """x [T, K], weight, three alphas, bias; all leaves"""
    torch.manual_seed(1)
    x, weight, bias = scale * torch.randn(S * B, K), torch.randn(M, K) / K**0.5, 0.3 * torch.randn(M)
    alphas = torch.tensor([1.1]), torch.tensor([0.7]), torch.tensor([1.3])
    return [tensor.requires_grad_() for tensor in (x, weight, *alphas, bias)]


def expected_maps(x, weight, alpha_pre, alpha_post, alpha_res, bias):
    alphas, x = (alpha_pre, alpha_post, alpha_res), x.unflatten(-1, (N, C))
    pre, post, res = logits(x, weight, alphas, bias, lambda v: 1 / (v.norm(dim=-1, keepdim=True) / K**0.5 + EPS))
    return pre.sigmoid() + EPS, 2 * post.sigmoid(), res.flatten(-2)


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e3])
def test_projection(scale):
    """The norm's factor differs by eps/rms, beside fp32's rounding. A token of zeros has the maps of the bias."""
    given = draw(scale)
    truth = in_fp64(given)
    *found, rms = megatron.fused_proj_rms_compute_h(*given, N)
    expected = expected_maps(*truth)
    tolerance = FP32 + EPS / scale
    assert_near([*found, *gradients(found, given)], [*expected, *gradients(expected, truth)], tolerance)
    assert_near([rms], [truth[0].norm(dim=-1, keepdim=True) / K**0.5], FP32)
    *maps, h_res, rms = megatron.fused_proj_rms_compute_h(torch.zeros(1, K), *given[1:], N)
    assert_near([h_res[0], rms[0] + 1], [given[-1][2 * N :], torch.ones(1)], FP32)
    assert all(h.isfinite().all() for h in maps)


@pytest.mark.parametrize("with_bias", [False, True])
def test_aggregate_and_post(with_bias):
    torch.manual_seed(2)
    given = [torch.randn(S, B, N, C), torch.randn(S, B, C), torch.rand(S, B, N), torch.rand(S, B, N)]
    given += [torch.rand(S, B, N, N), *([torch.randn(C)] if with_bias else [])]
    residual, x, h_pre, h_post, h_res, *bias = [tensor.requires_grad_() for tensor in given]
    found = [megatron.fused_h_aggregate(residual, h_pre)]
    found += [megatron.fused_h_post_bda(h_res, residual, h_post, x, *(bias or [None]))]
    residual, x, h_pre, h_post, h_res, *bias = truth = in_fp64(given)
    expected = read(residual, h_pre), write(residual, x + sum(bias), h_post, h_res)
    assert_near([*found, *gradients(found, given)], [*expected, *gradients(expected, truth)], FP32)


def test_types_are_those_of_the_streams():
    """Megatron hands maps over in bf16."""
    torch.manual_seed(3)
    shapes = (S, B, N, C), (S, B, C), (C,), (S, B, N), (S, B, N, N)
    given = residual, x, bias, h_post, logit = [torch.randn(shape).bfloat16() for shape in shapes]
    h_res = megatron.fused_sinkhorn(logit, 20)
    found = megatron.fused_h_post_bda(h_res, residual, h_post, x, bias)
    assert h_res.dtype == found.dtype == torch.bfloat16
    residual, x, bias, h_post, logit = in_fp64(given)
    expected = write(residual, x + bias, h_post, h_res.double())
    assert_near([h_res, found], [sinkhorn(logit, 20, EPS), expected], BF16)


def test_aggregate_into_a_buffer():
    x, h_pre = torch.randn(S, B, N, C), torch.rand(S, B, N, requires_grad=True)
    out = torch.empty(S, B, C)
    found = megatron.fused_h_aggregate_into(x, h_pre, out)
    assert found.data_ptr() == out.data_ptr() and torch.equal(found, megatron.fused_h_aggregate(x, h_pre))
    (gradient,) = torch.autograd.grad(found.sum(), h_pre)
    assert_near([gradient], [x.sum(-1)], FP32)
    out = out.detach()
    for buffer in (out[..., 1:], out.half(), out.mT.contiguous().mT, torch.empty(S, B, C, requires_grad=True)):
        with pytest.raises(ValueError, match=r"^fused_h_aggregate_into: out must "):
            megatron.fused_h_aggregate_into(x, h_pre, buffer)


def config(**changes):
    own = {"hidden_size": C, "num_residual_streams": N, "mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.5}
    return SimpleNamespace(**{**own, "sequence_parallel": False, **changes})


def test_module():
    torch.manual_seed(4)
    module = megatron.HyperConnectionModule(config(), layer_number=1)
    parameters = [module.mapping_proj.weight, module.alpha_pre, module.alpha_post, module.alpha_res, module.bias]
    assert {*map(id, module.parameters())} == {*map(id, parameters)}
    assert [tuple(parameter.shape) for parameter in parameters] == [(M, K), (1,), (1,), (1,), (M,)]
    x, bias = torch.randn(S, B, K, requires_grad=True), torch.randn(C)
    h_in, h_res, h_post, residual = module(x)
    found = module.fused_h_res_h_post_bda(h_res, residual, h_post, (torch.tanh(h_in), bias), 0.1, False, True)
    truth = in_fp64([x, *parameters])
    h_pre, h_post, h_res = expected_maps(*truth)
    streams, h_res = truth[0].unflatten(-1, (N, C)), sinkhorn(h_res.unflatten(-1, (N, N)), 20, EPS)
    h_out = torch.tanh(read(streams, h_pre)) + bias.double()
    expected = write(streams, h_out, h_post, h_res).flatten(-2)
    results, exact = gradients([found], [x, *parameters]), gradients([expected], truth)
    assert_near([found, *results], [expected, *exact], FP32)


def test_dropout_is_of_what_is_written():
    module = megatron.HyperConnectionModule(config(), layer_number=1)
    x = torch.randn(S, B, K)
    h_in, h_res, h_post, residual = module(x)
    mixed = module.fused_h_res_h_post_bda(h_res, residual, h_post, (h_in * 0, None), 0.0, True, True)
    torch.manual_seed(5)
    found = module.fused_h_res_h_post_bda(h_res, residual, h_post, (h_in, None), 0.5, True, True)
    torch.manual_seed(5)
    written = torch.nn.functional.dropout(h_post[..., None] * h_in.unsqueeze(-2), 0.5).flatten(-2)
    assert_near([found], [mixed + written], FP32)


def test_ends():
    torch.manual_seed(6)
    x = torch.randn(S, B, C)
    streams = megatron.HyperConnectionModule.input_expand(x, N)
    assert torch.equal(streams, x.repeat(1, 1, N))
    assert_near([megatron.HyperConnectionModule.output_contract(streams, N)], [x], FP32)
    v, head_fn, base, scale = torch.randn(S, B, K), torch.randn(N, K), torch.randn(N), torch.tensor([0.3])
    weights = (v @ head_fn.T * inverse_rms(v, EPS) * scale + base).sigmoid() + EPS
    found = megatron.learned_output_contract(v, head_fn, base, scale, N, EPS)
    assert_near([found], [read(v.unflatten(-1, (N, C)), weights)], FP32)
    assert torch.equal(megatron.fused_add_3(x, x, x), 3 * x)


def test_attributes_of_parameters():
    """They tell Megatron which parameters stay in fp32, and which gradients are summed over the group."""
    for parallel in (False, True):
        module = megatron.HyperConnectionModule(config(sequence_parallel=parallel), layer_number=1)
        assert all(parameter.keep_in_fp32 for parameter in module.parameters())
        assert all(getattr(parameter, "sequence_parallel", False) is parallel for parameter in module.parameters())
    with pytest.raises(NotImplementedError, match="recomputation needs Megatron's own module"):
        module(torch.randn(S, B, K), mhc_recompute_manager=object())


@pytest.fixture
def megatron_core(written):
    """A Megatron with the file that is stood in for, which must not run. Yields the folder of that file."""
    files = {"megatron/core/__init__.py": "", "megatron/core/fusions/__init__.py": ""}
    yield written(files | {FILE: "raise AssertionError('its own kernels were loaded')\n"}) / "megatron/core/fusions"
    megatron.uninstall()


def test_install(megatron_core):
    megatron.install()
    from megatron.core.fusions import fused_mhc_kernels

    assert fused_mhc_kernels.fused_sinkhorn is megatron.fused_sinkhorn
    assert fused_mhc_kernels.log_fused_mhc_backend_once() is None
    assert fused_mhc_kernels.is_triton_available() and not fused_mhc_kernels.is_cutile_available()
    megatron.uninstall()
    assert not hasattr(sys.modules["megatron.core.fusions"], "fused_mhc_kernels")


NO_FILE = f"install: there is no {FILE} here; Megatron-Core's dev branch has it"


def test_install_without_megatron():
    with says(ImportError, NO_FILE):
        megatron.install()
    assert "megatron.core.fusions.fused_mhc_kernels" not in sys.modules


def test_install_where_something_is_missing(megatron_core):
    """A package of Megatron's own; or the file, as in its main branch, where nothing would import the functions."""
    (megatron_core.parent / "__init__.py").write_text("import a_package_that_is_not_there\n")
    with says(ModuleNotFoundError, "No module named 'a_package_that_is_not_there'"):
        megatron.install()
    (megatron_core.parent / "__init__.py").write_text("")
    (megatron_core / "fused_mhc_kernels.py").unlink()
    with says(ImportError, NO_FILE):
        megatron.install()
    assert "megatron.core.fusions.fused_mhc_kernels" not in sys.modules
