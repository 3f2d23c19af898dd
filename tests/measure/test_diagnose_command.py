"""mhc-ops diagnose: what it prints and writes, and how it exits."""

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure.diagnose import command
from mhc_ops.mhc import reference
from mhc_ops.testing import cases

SMALL = ["--device", "cpu", "--shape", "12x4x24"]


def plant(monkeypatch, *factors):
    """mhc_post multiplies each stream by one of these, but not in fp64, where it is the truth."""
    right = reference.mhc_post

    def wrong(x, *arguments):
        x_next = right(x, *arguments)
        return x_next if x.dtype == torch.float64 else x_next * torch.tensor(factors)[:, None]

    monkeypatch.setattr(reference, "mhc_post", wrong)


def test_silence(capsys):
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("mhc_post, reference: nothing found in 8 cases; the largest error is ")
    assert "diagnose 1/8: mhc_post 12x4x24 float32" in printed.err


def test_something_is_off(capsys, monkeypatch):
    plant(monkeypatch, 1, 0, 0, 0)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mhc_post 12x4x24 float32, reference: 5 of 5 outputs are off"
    assert lines[1].startswith("  1. x_next: streams 1 to 3 are zero: masked, or never added to")
    of_dx_next = "streams 1 to 3 of dx_next are read as zero for dh_res"
    assert lines[2].startswith(f"  2. dx, dh_res, dh_out, dh_post: {of_dx_next}")
    assert "x_next  [12 tokens, 4 streams, 24 channels]" in lines
    assert "  place               streams 1 to 3, 100.0% of it wrong" in lines
    assert lines[-1] == "0 of 8 cases right, 1 off, 7 not run"


@pytest.mark.parametrize(
    ("factors", "words"), [((2, 2, 2, 2), "constant: mean 2,"), ((2, -1, 2, -1), "varying: mean 0.")]
)
def test_a_constant_ratio_is_told_from_a_varying_one(factors, words, capsys, monkeypatch):
    plant(monkeypatch, *factors)
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--dtype", "fp32"]) == 1
    ratio = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  result / truth"))
    assert f" {words}" in ratio


SHAPES = ["2xx3", "a", "0x4x8", "-1x4", "99999999999999999999x4x4"]
WRONG = {("mhc_psot",): [*(subject.name for subject in cases.SUBJECTS), "short_conv"]}
WRONG |= {("mhc_post", f"--shape={shape}"): ["argument --shape"] for shape in SHAPES}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["diagnose", *arguments])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in WRONG[arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mhc_post", "--backend", "hip"], "backend 'hip' cannot run here: there are no hip kernels for mhc"),
        (["short_conv", "--backend", "hip", "--device", "cpu"], "hip cannot run short_conv"),
        (["mhc_post", "--shape", "7"], "--shape of mhc_post must be Tx…xNxD, got 7"),
        (["sinkhorn", "--shape", "7x4x3"], "--shape of sinkhorn must be TxNxN, got 7x4x3"),
        (["causal_conv1d", "--shape", "7x4"], "--shape of causal_conv1d must be BxLxD, got 7x4"),
        (["causal_conv1d_prefill", "--shape", "7x4"], "--shape of causal_conv1d_prefill must be BxLxD, got 7x4"),
        (["mhc_post", "--width", "3"], "mhc_post has no --width"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run(arguments, message, capsys):
    assert cli.main(["diagnose", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.interpreted
@pytest.mark.parametrize("op", ["mhc_post", "mhc_read"])
def test_the_kernels_in_the_interpreter(op, capsys):
    arguments = ["--device", "cpu", "--backend", "triton", "--shape", "5x2x8", "--dtype", "fp32"]
    assert cli.main(["diagnose", op, *arguments]) == 0
    assert f"{op}, triton: nothing found" in capsys.readouterr().out


def test_more_than_memory_holds(monkeypatch, capsys):
    """The message is that of torch's allocator on a CPU."""

    def full(*arguments):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ...")

    monkeypatch.setattr(command, "diagnose", full)
    assert cli.main(["diagnose", "mhc_post", "--device", "cpu"]) == 2
    assert "can't allocate memory" in capsys.readouterr().err
