"""The functions of other libraries and ours have the same arguments: names, order, defaults."""

import operator
import re

import pytest
from compat_oracle import signature

from mhc_ops import compat

MAPS = "fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat"
OF_LIGER = "tmax=20, rms_eps=1e-06, pre_eps=0.0, sinkhorn_eps=1e-06, post_mult=2.0"
SIGNATURES = f"""
causal_conv1d.causal_conv1d_interface.causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None,
    return_final_states=False, final_states_out=None, activation=None)
causal_conv1d.causal_conv1d_interface.causal_conv1d_update(x, conv_state, weight, bias=None, activation=None,
    cache_seqlens=None, conv_state_indices=None)
causal_conv1d.causal_conv1d_interface.causal_conv1d_ref(x, weight, bias=None, initial_states=None,
    return_final_states=False, final_states_out=None, activation=None, seq_idx=None)
causal_conv1d.causal_conv1d_interface.causal_conv1d_update_ref(x, conv_state, weight, bias=None, activation=None,
    cache_seqlens=None)
causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states(x, cu_seqlens, state_len)
causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states_ref(x, cu_seqlens, state_len)
causal_conv1d.cpp_functions.causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out,
    silu_activation)
causal_conv1d.cpp_functions.causal_conv1d_bwd_function(x, weight, bias, dout, seq_idx, initial_states, dfinal_states,
    dx, return_dinitial_states, silu_activation)
causal_conv1d.cpp_functions.causal_conv1d_update_function(x, conv_state, weight, bias, silu_activation, cache_seqlens,
    conv_state_indices)
fla.causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
    activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
    **kwargs)
fla.causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None)
fla.ShortConvolution(hidden_size, kernel_size, bias=False, activation='silu', backend='triton', device=None, dtype=None,
    **kwargs)
fla.ShortConvolution.forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None,
    chunk_indices=None, **kwargs)
liger.liger_mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, {OF_LIGER})
liger.liger_mhc_forward(x, layer, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, {OF_LIGER},
    return_coeffs=False)
liger.LigerMHC(layer, *, hc, c, {OF_LIGER}, phi_dtype=torch.float16, allow_fp32=False)
tile_kernels.mhc_pre(residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, post_mult_value=1.0,
    pre_eps=1e-06, sinkhorn_eps=1e-06, sinkhorn_repeat=10, n_splits=16)
tile_kernels.mhc_head(residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, pre_eps=1e-06,
    n_splits=16)
tile_kernels.expand_from_embedding(x, mhc_mult=4)
tile_kernels.mhc_pre_norm_fn(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, fuse_grad_acc=True, n_splits=16)
tile_kernels.sinkhorn_normalize(x, repeat=10, eps=1e-06)
tile_kernels.mhc_pre_big_fuse(residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
    mhc_post_mult_value, sinkhorn_repeat, n_splits=16)
tile_kernels.mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, d_o, fuse_grad_acc=True)
tile_kernels.expand_to_mhc(hidden, mhc_mult, out=None)
tile_kernels.mhc_pre_apply_mix(x, mix, out=None)
tile_kernels.mhc_post(x, residual, post_layer_mix, comb_res_mix, out=None)
tile_kernels.mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out=None)
tile_kernels.mhc_pre_split_mixes(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
tile_kernels.mhc_head_compute_mix(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
tile_kernels.mhc_multilayer_recompute(initial_residual, pre_mix_list, layer_output_list, post_mix_list, comb_mix_list,
    layer_input_list, residual_list)
vllm.causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
    activation='silu', pad_slot_id=-1, null_block_id=0, block_idx_first_scheduled_token=None,
    block_idx_last_scheduled_token=None, initial_state_idx=None, num_computed_tokens=None, block_size_to_align=0,
    metadata=None, validate_data=False)
vllm.causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
    num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, null_block_id=0,
    block_idx_last_scheduled_token=None, initial_state_idx=None, validate_data=False, out=None)
vllm.mhc_pre(residual, {MAPS}, n_splits=1, norm_weight=None, norm_eps=0.0)
vllm.mhc_fused_post_pre(x, residual, post_layer_mix, comb_res_mix, {MAPS}, n_splits=1, tile_n=1, norm_weight=None,
    norm_eps=0.0)
vllm.mhc_pre_delayed(residual, {MAPS}, pre_mix=None, x=None, norm_weight=None, norm_eps=1e-06, sublayer_out=None,
    post_layer_mix=None, comb_res_mix=None)
vllm.mhc_post(x, residual, post_layer_mix, comb_res_mix)
vllm.hc_head(hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)
sglang.conv.causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None,
    has_initial_state=None, activation='silu', pad_slot_id=-1, validate_data=False, block_table=None)
sglang.conv.causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
    conv_state_indices=None, num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None,
    retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, metadata=None,
    validate_data=False)
sglang.conv.causal_conv1d_fn_cuda(x, weight, bias=None, query_start_loc=None, cache_indices=None,
    has_initial_state=None, conv_states=None, activation='silu', pad_slot_id=-1, seq_lens_cpu=None, block_table=None)
sglang.conv.causal_conv1d_update_cuda(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
    conv_state_indices=None, pad_slot_id=-1)
sglang.mhc.mhc_pre(residual, {MAPS}, n_splits=1, n_splits_pre=32, *, norm_weight=None, norm_eps=None)
sglang.mhc.mhc_fused_post_pre(x, residual, post_layer_mix, comb_res_mix, {MAPS}, n_splits=1, tile_n=1, *,
    norm_weight=None, norm_eps=None)
sglang.mhc.mhc_post(x, residual, post_layer_mix, comb_res_mix)
sglang.mhc.hc_pre(x, hc_fn, hc_scale, hc_base, hc_mult, rms_eps, hc_eps, sinkhorn_iters, post_mult_value=2.0,
    hc_norm_weight=None, out_norm_weight=None, out_norm_eps=None)
sglang.mhc.hc_post(x, residual, h_post, h_res, hc_mult)
sglang.mhc.fused_hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps)
sglang.mhc.fused_hy4_ihc_pre(x, hc_fn, hc_scale, hc_base, magnitude, norm_eps, hc_eps, rms_weight=None, rms_eps=0.0)
sglang.mhc.fused_hy4_ihc_post_pre(output, residual, post, hc_fn, hc_scale, hc_base, magnitude, norm_eps, hc_eps,
    rms_weight=None, rms_eps=0.0)
"""
EXPECTED = {name: " ".join(given.split()) for name, given in re.findall(r"^(\S+?)\((.+?)\)$", SIGNATURES, re.M | re.S)}


@pytest.mark.parametrize("name", EXPECTED)
def test_signature(name):
    assert signature(operator.attrgetter(name)(compat)) == EXPECTED[name]
