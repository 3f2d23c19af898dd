"""mhc_ops.compat.tile_kernels against the equations of TileKernels 1.0, and under its name."""

import importlib
import sys

import pytest
import torch
from compat_oracle import BF16, FP32, assert_near, gradients, in_fp64, inverse_rms, logits, read, sinkhorn, total, write

from mhc_ops.compat import tile_kernels as tk

B, S, N, D = 2, 5, 4, 24
M, K = N * N + 2 * N, N * D


def draw(dtype=torch.bfloat16):
    """residual, fn, scale, base, norm_weight; all leaves"""
    torch.manual_seed(1)
    residual = torch.randn(B, S, N, D).to(dtype)
    fn, scale = torch.randn(M, K) / K**0.5, torch.tensor([1.1, 0.7, 1.3])
    base, norm_weight = 0.3 * torch.randn(M), 1 + 0.2 * torch.randn(K)
    return [tensor.requires_grad_() for tensor in (residual, fn, scale, base, norm_weight)]


def expected_pre(residual, fn, scale, base, norm_weight, post_mult=1.0, repeat=10, eps=1e-6):
    pre, post, comb = logits(residual, fn * norm_weight, scale, base, lambda v: inverse_rms(v, eps))
    layer_input = read(residual, pre.sigmoid() + eps)
    return layer_input, (post_mult * post.sigmoid()).unsqueeze(-1), sinkhorn(comb, repeat, eps)


def pre(residual, fn, scale, base, norm_weight, **options):
    layer_input, (post_mix, comb_mix) = tk.mhc_pre(residual, fn, scale, base, norm_weight=norm_weight, **options)
    return layer_input, post_mix, comb_mix


def pre_in_pieces(residual, fn, scale, base, norm_weight):
    mixes = tk.mhc_pre_norm_fn(residual, fn, norm_weight, 1e-6, fuse_grad_acc=False)
    pre_mix, post_mix, comb_mix = tk.mhc_pre_split_mixes(mixes, scale, base, N, 1.0, 1e-6)
    return tk.mhc_pre_apply_mix(residual, pre_mix), post_mix, tk.sinkhorn_normalize(comb_mix)


DEEPSEEK_V4 = {"post_mult_value": 2.0, "sinkhorn_repeat": 20}
WAYS = [(pre, torch.float32, {}), (pre, torch.bfloat16, DEEPSEEK_V4), (pre_in_pieces, torch.float32, {})]


@pytest.mark.parametrize(("function", "dtype", "options"), WAYS)
def test_pre(function, dtype, options):
    given = draw(dtype)
    outputs, truths = function(*given, **options), expected_pre(*(truth := in_fp64(given)), *options.values())
    for found, expected in ((outputs, truths), (gradients(outputs, given), gradients(truths, truth))):
        assert [tensor.dtype for tensor in found] == [dtype] + [torch.float32] * (len(found) - 1)
        assert_near(found[:1], expected[:1], BF16 if dtype == torch.bfloat16 else FP32)
        assert_near(found[1:], expected[1:], FP32)


def test_norm_weight_counts_without_gradients_too():
    given = draw()
    with torch.no_grad():
        found = pre(*given)
    assert all(map(torch.equal, found, pre(*given)))
    residual, fn, scale, base, _ = given
    with pytest.raises(ValueError, match="mhc_pre: residual must be "):
        tk.mhc_pre(residual, fn, scale, base, mhc_mult=2)
    fused = tk.mhc_pre_big_fuse(residual, fn, scale, base, 1e-6, 1e-6, 1e-6, 1.0, 10)
    layer_input, (post_mix, comb_mix) = tk.mhc_pre(residual, fn, scale, base)
    assert not any(result.requires_grad for result in fused)
    assert all(map(torch.equal, fused, (post_mix, comb_mix, layer_input)))


def test_post():
    torch.manual_seed(2)
    given = torch.randn(B, S, D), torch.randn(B, S, N, D), torch.rand(B, S, N, 1), torch.rand(B, S, N, N)
    given = [tensor.requires_grad_() for tensor in given]
    x, residual, post, comb = truth = in_fp64(given)
    found, expected = tk.mhc_post(*given), write(residual, x, post.squeeze(-1), comb)
    assert_near([found, *gradients([found], given)], [expected, *gradients([expected], truth)], FP32)
    d_o = torch.randn_like(found)
    assert_near(tk.mhc_post_bwd(*given, d_o), torch.autograd.grad(expected, truth, d_o.double()), FP32)


@pytest.mark.parametrize("rows", [N, M])
def test_head(rows):
    """fn of n rows, or padded as for the pieces."""
    residual, fn, scale, base, norm_weight = draw(torch.float32)
    fn, scale, base = fn.detach()[:rows].requires_grad_(), scale[0], base[:N]
    found = tk.mhc_head(residual, fn, scale, base, norm_weight=norm_weight)
    mixes = tk.mhc_pre_norm_fn(residual, fn, norm_weight, 1e-6)[..., :N]
    in_pieces = tk.mhc_pre_apply_mix(residual, tk.mhc_head_compute_mix(mixes, scale, base, 1e-6).unsqueeze(-1))
    x, phi, alpha, bias, gamma = (tensor.double() for tensor in (residual, fn, scale, base, norm_weight))
    v = x.flatten(-2)
    weights = (v @ (phi[:N] * gamma).T * inverse_rms(v, 1e-6) * alpha + bias).sigmoid() + 1e-6
    expected, given = read(x, weights), [residual, fn, norm_weight]
    for result in (found, in_pieces):
        assert_near([result, *gradients([result], given)], [expected, *gradients([expected], given)], FP32)


def test_out_is_written_and_keeps_no_graph():
    residual, mix, buffer = draw()[0], torch.rand(B, S, N, 1, requires_grad=True), torch.empty(B, S, D).bfloat16()
    found = tk.mhc_pre_apply_mix(residual, mix, out=buffer)
    assert found.data_ptr() == buffer.data_ptr() and found.requires_grad and not buffer.requires_grad
    assert torch.equal(buffer, tk.mhc_pre_apply_mix(residual, mix))
    torch.autograd.grad(found.float().sum(), [residual, mix])


@pytest.mark.parametrize("ddp", [False, True], ids=["", "ddp"])
@pytest.mark.parametrize("function", [pre, pre_in_pieces])
def test_main_grad(function, ddp):
    """Gradients are added to what is there, of every parameter that has the attribute, and .grad stays None. Under
    Megatron's DDP each is told that it was added, and has zeros as its .grad, which that waits for."""
    given = draw()
    expected = gradients(function(*given), given)
    for parameter in given[1:]:
        parameter.main_grad = torch.full_like(parameter, 3)
        if ddp:
            parameter.grad_added_to_main_grad = False
    total(function(*given)).backward()
    assert torch.equal(given[0].grad, expected[0])
    for parameter in given[1:]:
        assert parameter.grad_added_to_main_grad and not parameter.grad.any() if ddp else parameter.grad is None
    assert_near([parameter.main_grad - 3 for parameter in given[1:]], expected[1:], FP32)


@pytest.mark.parametrize("outputs", [2, 3])
def test_multilayer_recompute(outputs):
    torch.manual_seed(3)
    pre_mix, x = torch.rand(3, B, S, N, 1).unbind(), torch.randn(B, S, N, D).bfloat16()
    post_mix, comb_mix = torch.rand(outputs, B, S, N, 1).unbind(), torch.rand(outputs, B, S, N, N).unbind()
    out, streams = torch.randn(outputs, B, S, D).bfloat16().unbind(), [x]
    for given in zip(out, post_mix, comb_mix):
        streams.append(tk.mhc_post(given[0], streams[-1], *given[1:]))
    expected = [*map(tk.mhc_pre_apply_mix, streams, pre_mix), *streams[1:]]
    inputs, between = [torch.empty(B, S, D).bfloat16() for _ in pre_mix], [torch.empty_like(x) for _ in out]
    tk.mhc_multilayer_recompute(x, pre_mix, out, post_mix, comb_mix, inputs, between)
    assert all(torch.equal(*pair) for pair in zip([*inputs, *between], expected, strict=True))
    with pytest.raises(AssertionError, match="L or L − 1 outputs"):
        tk.mhc_multilayer_recompute(x, pre_mix, out[:1], post_mix, comb_mix, inputs, between)


def test_expand():
    x = torch.randn(B, S, D, requires_grad=True)
    found = tk.expand_from_embedding(x)
    assert torch.equal(found, x.unsqueeze(-2).expand(B, S, 4, D)) and found.is_contiguous()
    assert torch.equal(*torch.autograd.grad(found.sum(), x), torch.full_like(x, 4))


def test_the_kernels_that_automodel_takes():
    x, d_out = torch.randn(7, N, N), torch.randn(7, N, N)
    truth = x.double().requires_grad_()
    expected = sinkhorn(truth, 20, 1e-6)
    out, d_x = torch.empty_like(x), torch.empty_like(x)
    tk._mhc_sinkhorn_fwd(N, 1, 20, 1e-6)(x, out)
    tk._mhc_sinkhorn_bwd(N, 32, 20, 1e-6)(d_out, x, d_x)
    assert_near([out, d_x], [expected, *torch.autograd.grad(expected, truth, d_out.double())], FP32)


VERSION_1_OR_2 = {
    "tile_kernels/__init__.py": "version = 2\n",
    "tile_kernels/modeling/__init__.py": "engram = 'its own'\n",
    "tile_kernels/mhc/__init__.py": "from .sinkhorn_kernel import mhc_sinkhorn_fwd\n",
    "tile_kernels/mhc/sinkhorn_kernel.py": "mhc_sinkhorn_fwd = _mhc_sinkhorn_fwd = 'its own'\n",
}


@pytest.mark.parametrize("loaded", [False, True])
def test_install_beside_another_version(loaded, written):
    """What it has stays its own, and the names that it lacks are added until uninstall()."""
    file = written(VERSION_1_OR_2) / "tile_kernels" / "mhc" / "sinkhorn_kernel.py"
    finders = list(sys.meta_path)
    if loaded:
        importlib.import_module("tile_kernels.mhc")
        importlib.import_module("tile_kernels.modeling")
    for _ in range(2):
        tk.install()
    assert ("tile_kernels" in sys.modules) == loaded  # nor is TileLang, which it imports
    import tile_kernels.modeling
    from tile_kernels.mhc import sinkhorn_kernel
    from tile_kernels.modeling.mhc.ops import mhc_post

    assert mhc_post is tk.mhc_post and (not loaded or tile_kernels.modeling.mhc.mhc_pre is tk.mhc_pre)
    assert (tile_kernels.version, tile_kernels.modeling.engram) == (2, "its own")
    assert sinkhorn_kernel._mhc_sinkhorn_bwd is tk._mhc_sinkhorn_bwd
    assert sinkhorn_kernel._mhc_sinkhorn_fwd == "its own" and sinkhorn_kernel.__file__ == str(file)
    tk.uninstall()
    assert hasattr(sinkhorn_kernel, "_mhc_sinkhorn_fwd") and not hasattr(sinkhorn_kernel, "_mhc_sinkhorn_bwd")
    assert not hasattr(tile_kernels.modeling, "mhc")
    assert sys.modules["tile_kernels.mhc.sinkhorn_kernel"] is sinkhorn_kernel
    assert sys.meta_path == finders
