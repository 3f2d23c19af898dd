"""TileLang kernels that its CPU target can execute, inside the real launchers and under autograd, against fp64.

The two kernels with matrix products are not among them (no fragments on a CPU): torch stands in for those two.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from mhc_kernels import STREAMED, backward_by_hand, failures, leave_out
from sinkhorn_oracle import assert_pre_has_the_sinkhorn_of_its_logits, assert_right

pytest.importorskip("tilelang")
import mhc_ops
from mhc_ops.core import backend
from mhc_ops.mhc.tilelang import build, pre_bwd, pre_project, pre_sums
from mhc_ops.mhc.tilelang.pre_dx import DxNext
from mhc_ops.testing import accuracy, cases


def project(*, M, K, config, **constants):
    def run(*, x, phi, partials):
        partials.zero_()
        for piece in range(config.slices(K)):
            columns = slice(piece * config.slice_k, (piece + 1) * config.slice_k)
            partials[piece, :M] = phi[:M, columns] @ x[:, columns].T
            partials[piece, M] = x[:, columns].square().sum(1)

    return run


def dx(*, n, D, M, in_dtype, residual, config, **constants):
    def run(*, x, dh_in, dx_next, dh_mix, phi, factor, dx, A, steps):
        size = steps * config.block_t
        for piece in range(len(A)):
            tokens = slice(piece * size, (piece + 1) * size)
            A[piece] = dh_mix[tokens, :M].T @ x[tokens]
        total = dh_mix @ phi + factor[:, :1] * x
        if in_dtype is not None:
            total += (factor[:, 1 : 1 + n, None] * dh_in[:, None]).flatten(1)
        if residual is DxNext.MIXED:
            h_res = factor[:, 1 + n : 1 + n + n * n].unflatten(1, (n, n))
            total += (h_res @ dx_next.unflatten(1, (n, D))).flatten(1)
        if residual is DxNext.ADDED:
            total += dx_next
        dx.copy_(total)

    return run


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(pre_project, "mhc_pre_project_kernel", project)
    monkeypatch.setattr(pre_bwd, "mhc_pre_dx_kernel", dx)
    monkeypatch.setattr(backend, "why_not", lambda family, name, device_type: None)


CASES = [cases.Case(subject, (37,), 4, 24, torch.float32) for subject in cases.SUBJECTS]
CASES += [cases.Case(cases.MHC_LAYER, (37,), n, 9, torch.float32, gamma=False) for n in (1, 3, 8)]
CASES += [cases.Case(cases.SINKHORN, (37,), 8, 0, torch.float32)]
OF_SEEDS = [replace(case, seed=case.seed + seed) for case in CASES for seed in range(3)]
# Outputs that are not used, at sizes that CASES have too: a kernel takes a second to compile.
PARTS = [
    cases.Case(subject, (9,), n, D, torch.float32, unused=unused)
    for subject in STREAMED
    for n, D in ((4, 24), (8, 9))
    for unused in leave_out(subject)
    if unused
]


@pytest.mark.parametrize("case", [*OF_SEEDS, *PARTS], ids=str)
def test_on_cpu(case, on_cpu, poisoned):
    assert failures(case, "tilelang") == []


def test_other_types_and_offsets(on_cpu):
    """What autograd does not bring: cotangents and maps of other types, tensors that begin anywhere."""
    tensors = cases.Case(cases.MHC_FORWARD_PRE, (9,), 3, 8, torch.float32).inputs()
    x = torch.cat([tensors["x"].new_zeros(1), tensors["x"].flatten()])[1:].view_as(tensors["x"])
    assert x.data_ptr() % 16 != 0
    given = tensors | {"x": x}
    outputs = accuracy.run(cases.MHC_FORWARD_PRE, given, "tilelang")
    outputs |= {name: outputs[name].double() for name in ("inv_rms", "h_mix")}
    dh_in, dh_post, dh_res = accuracy.random_cotangents(cases.MHC_FORWARD_PRE, outputs)
    cotangents = dh_in.half().double(), dh_post.half(), dh_res.half()
    results = backward_by_hand(partial(mhc_ops.mhc_backward, backend="tilelang"), given, outputs, cotangents)
    exact = backward_by_hand(partial(mhc_ops.mhc_backward, backend="reference"), tensors, outputs, cotangents)
    assert [name for name in exact if not accuracy.close(results[name], exact[name].double())] == []


def test_h_out_in_fp64(on_cpu):
    tensors = cases.Case(cases.MHC_POST, (9,), 3, 8, torch.float32).inputs()
    tensors["h_out"] = tensors["h_out"].double()
    cotangents = accuracy.random_cotangents(cases.MHC_POST, accuracy.run(cases.MHC_POST, tensors, "tilelang"))
    results = accuracy.run(cases.MHC_POST, tensors, "tilelang", cotangents)
    exact = accuracy.truth(cases.MHC_POST, tensors, cotangents)
    assert results["dh_out"].dtype == torch.float64
    assert all(accuracy.close(results[name].float(), exact[name]) for name in exact)


def test_steep_logits(on_cpu, poisoned):
    for eps in (0.0, 1e-6):
        assert_right(4, eps, "tilelang", "cpu")
    case = cases.Case(cases.MHC_PRE, (37,), 4, 24, torch.float32, sigma=80)
    assert_pre_has_the_sinkhorn_of_its_logits(case, 20, "tilelang", "cpu")


def test_arguments_of_a_kernel_go_by_name():
    """Two fp32 vectors of the same length, as a caller could swap them unseen."""
    launch = pre_sums.mhc_pre_dbias_kernel(M=2, threads=build.ON_CPU)
    inputs = {"sums": torch.arange(12.0).view(2, 2, 3), "missing": torch.ones(2, 5)}
    outputs = {"dbias": torch.empty(2), "by_row": torch.empty(2)}
    launch(**dict(reversed(outputs.items())), **inputs)
    assert outputs["dbias"].tolist() == [3.0, 12.0] and outputs["by_row"].tolist() == [26.0, 35.0]
    with pytest.raises(TypeError, match=r"^mhc_pre_dbias: missing \['by_row'\], unknown \['by_column'\]$"):
        launch(**inputs, dbias=outputs["dbias"], by_column=outputs["by_row"])
