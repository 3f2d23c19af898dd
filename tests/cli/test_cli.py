"""mhc-ops: what it prints and how it exits."""

import json
import subprocess
import sys

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure import cases, peers

SMALL = (cases.Case(cases.MHC_FORWARD_PRE, (9,), 2, 8, torch.bfloat16),)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cli, "CHECK", SMALL)
    monkeypatch.setattr(cli, "BENCH_CPU", SMALL)


def test_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in printed
    assert "mhc   reference  runs on" in printed
    assert "no: there are no hip kernels for mhc" in printed


def test_check_passes(small, capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "reference"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == [
        "op",
        "and",
        "case",
        "backend",
        "output",
        "max",
        "error",
        "relative",
        "tolerance",
        "verdict",
    ]
    assert len([line for line in lines if line.endswith("PASS")]) == 11
    assert lines[-1] == "11 passed, 0 failed"
    assert "check 1/1: mhc_forward_pre 9x2x8 bfloat16 reference" in printed.err


def test_check_fails(small, capsys, monkeypatch):
    """A wrong h_post: exit 1, FAIL in its row."""
    from mhc_ops.mhc import reference

    right = reference.mhc_pre

    def wrong(x, *arguments):
        h_in, h_post, *rest = right(x, *arguments)
        return h_in, h_post if x.dtype == torch.float64 else h_post * 1.01, *rest

    monkeypatch.setattr(reference, "mhc_pre", wrong)
    assert cli.main(["check", "--device", "cpu", "--backend", "reference"]) == 1
    failed = [line.split()[-5] for line in capsys.readouterr().out.splitlines() if line.endswith("FAIL")]
    assert "h_post" in failed
    assert "h_in" not in failed


def test_check_of_a_backend_that_cannot_run(small, capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "hip"]) == 2
    assert "mhc: hip did not run: there are no hip kernels for mhc" in capsys.readouterr().out


def test_check_names_what_did_not_run(small, capsys):
    assert cli.main(["check", "--device", "cpu"]) == 0
    assert "mhc: tilelang did not run: there are no tilelang kernels for mhc" in capsys.readouterr().out


def test_bench(small, capsys, tmp_path, cxx):
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "--device", "cpu", "--backend", "reference", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {m["provider"] for m in content["measurements"]} == {"eager", "torch.compile"}
    assert {m["direction"] for m in content["measurements"]} == {"forward", "backward", "both"}
    assert content["versions"]["torch"] == torch.__version__
    assert "torch.compile" in capsys.readouterr().out


def test_bench_skips_and_says_what_is_missing(small, capsys, tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["bench", "--device", "cpu", "--peers", "--skip", "torch.compile mhc", "--json", str(file)]
    assert cli.main(arguments) == 0
    content = json.loads(file.read_text())
    assert {m["provider"] for m in content["measurements"]} == {"eager"}
    assert content["complete"] is True
    printed = capsys.readouterr().out
    assert all(peers.why_not(peer) is None or f"{peer.name} did not run: " in printed for peer in peers.PEERS)


def test_an_interrupted_bench_keeps_what_it_has(small, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    file = tmp_path / "bench.json"
    monkeypatch.setattr(cli, "speed_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["bench", "--device", "cpu", "--skip", "torch.compile", "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["complete"] is False
    assert len(content["measurements"]) == 3


def test_bench_without_cases(small):
    assert cli.main(["bench", "--device", "cpu", "--case", "nothing like this"]) == 2


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_device_that_is_not_there(device, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["check", "--device", device])
    assert exit.value.code == 2
    assert f"argument --device: {device}:" in capsys.readouterr().err


@pytest.mark.interpreted
def test_check_in_the_interpreter(small, capsys):
    """Also bf16, which triton's interpreter gets wrong by itself."""
    assert cli.main(["check", "--device", "cpu", "--backend", "triton"]) == 0
    assert capsys.readouterr().out.endswith("11 passed, 0 failed\n")


def test_bad_command_line():
    done = subprocess.run([sys.executable, "-m", "mhc_ops.cli", "chekc"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
