"""mhc-ops diagnose: what it prints and writes, and how it exits."""

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure import report
from mhc_ops.mhc import reference

SMALL = ["--device", "cpu", "--shape", "12x4x24"]


def test_silence(capsys):
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out == "mhc_post, reference: nothing found in 8 cases\n"
    assert "diagnose 1/8: mhc_post 12x4x24 float32" in printed.err


def test_something_is_off(capsys, monkeypatch):
    """mhc_post leaves out three streams, but not in fp64, where it is the truth."""
    right = reference.mhc_post

    def wrong(x, *arguments):
        x_next = right(x, *arguments)
        return x_next if x.dtype == torch.float64 else x_next * torch.tensor([1, 0, 0, 0])[:, None]

    cleared = []
    monkeypatch.setattr(report, "clear", lambda: cleared.append(None))
    monkeypatch.setattr(reference, "mhc_post", wrong)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mhc_post 12x4x24 float32, reference: 5 of 5 outputs are off"
    assert lines[1].startswith("  1. x_next: zero (masked, or never added to) in streams 1 to 3")
    of_dx_next = "streams 1 to 3 of dx_next are read as zero for dh_res"
    assert lines[2].startswith(f"  2. dx, dh_res, dh_out, dh_post: {of_dx_next}")
    assert "x_next  [12 tokens, 4 streams, 24 channels]: streams 1 to 3, 100.0% of it wrong" in lines
    assert lines[-1] == "0 of 8 cases right, 1 off, 7 not run"
    assert len(cleared) == 3, "for the place that is said, before the finding, and at the end"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mhc_post --backend hip", "backend 'hip' cannot run here: there are no hip kernels for mhc"),
        ("short_conv --backend hip --device cpu", "hip cannot run short_conv"),
        ("sinkhorn --shape 7x4x3", "--shape of sinkhorn must be TxNxN, got 7x4x3"),
        ("causal_conv1d_prefill --shape 7x4", "--shape of causal_conv1d_prefill must be BxLxD, got 7x4"),
        ("mhc_post --width 3", "mhc_post has no --width"),
    ],
)
def test_what_cannot_be_run(arguments, message, capsys):
    assert cli.main(["diagnose", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
