"""mhc-ops: what it prints and how it exits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import mhc_ops
from mhc_ops import cli
from mhc_ops.core import backend as backends
from mhc_ops.core import device as devices
from mhc_ops.measure import peers, selection
from mhc_ops.mhc import reference
from mhc_ops.testing import accuracy, cases

PAGE = Path(__file__).parents[2] / "docs" / "measure.md"
CHECK = "check --device cpu --backend reference"
BENCH = "bench --device cpu"


def saved(file="file"):
    return json.loads(Path(file).read_text())


def test_info(run, monkeypatch):
    code, printed, _ = run("info")
    assert code == 0 and f"torch     {torch.__version__}" in printed
    assert "mhc   reference  runs on" in printed and "no: there are no hip kernels for mhc" in printed
    known = {"is_available": True, "device_count": 2, "current_device": 0, "get_device_name": "NVIDIA L40S"}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=value))
    monkeypatch.setattr(devices, "of", lambda device: devices.Device("cuda", (8, 9), 99 << 10, 142))
    printed = run("info")[1]
    for index in range(2):
        assert f"cuda:{index}    NVIDIA L40S: capability 8.9, 99 KB of shared memory, 142 multiprocessors\n" in printed
    assert re.search(r"^replay    in (C|Python: .+)$", printed, re.MULTILINE)


def test_check_passes(small, run):
    code, printed, said = run(f"{CHECK} --rows")
    assert code == 0 and printed.endswith("11 passed, 0 failed\n")
    assert said == f"check 1/1: {small} reference\n"
    header, *lines = printed.splitlines()
    assert " ".join(header.split()) == "op and case backend output max error relative tolerance verdict"
    assert len([line for line in lines if line.startswith(str(small)) and line.endswith("PASS")]) == 11
    (summary,) = [line.split() for line in lines if line.startswith("mhc_forward_pre  ")]
    assert 0 < float(summary[-2]) <= 1  # of what is allowed


def test_check_fails(small, run, monkeypatch):
    """A wrong h_post: exit 1, its row is shown, and none of those that pass."""
    right = reference.mhc_pre

    def wrong(x, *arguments):
        h_in, h_post, *rest = right(x, *arguments)
        return h_in, h_post if x.dtype == torch.float64 else h_post * 1.01, *rest

    monkeypatch.setattr(reference, "mhc_pre", wrong)
    code, printed, _ = run(CHECK)
    lines = [line.split() for line in printed.splitlines()]
    failed = [words[-5] for words in lines if words[:2] == ["mhc_forward_pre", "9x2x8"]]
    assert code == 1 and "h_post" in failed and "h_in" not in failed
    (summary,) = [words for words in lines if words[:2] == ["mhc_forward_pre", "reference"]]
    assert (summary[4], summary[-1]) == (str(len(failed)), "FAIL")
    assert float(summary[5]) > 100  # of what is allowed


def test_check_goes_on_after_a_crash_and_keeps_what_it_has(small, run, monkeypatch):
    """And takes only the cases that were asked for."""
    right = accuracy.measure
    others = (cases.Case(cases.SINKHORN, (9,), 2, 0, torch.float32), cases.Case(cases.MHC_POST, (9,), 2, 8))
    errors = dict(zip(others, (OSError("no luck"), KeyboardInterrupt())))

    def measure(case, *arguments):
        if case in errors:
            raise errors[case]
        return right(case, *arguments)

    monkeypatch.setattr(accuracy, "measure", measure)
    monkeypatch.setattr(selection, "CHECK", (others[0], small, others[1]))
    code, printed, said = run(f"{CHECK} --json file")
    assert code == 130 and said.endswith("interrupted\n")
    assert saved()["complete"] is False and len(saved()["accuracy"]) == 11
    assert "sinkhorn 9x2x2 float32: reference did not run: OSError: no luck" in printed
    assert printed.endswith("11 passed, 0 failed, 1 did not run\n")
    assert run(f"{CHECK} --case sinkhorn")[0] == 1
    assert run(f"{CHECK} --case mhc_forward_pre")[0] == 0


def test_check_of_a_backend_that_cannot_run(small, run):
    code, printed, _ = run("check --device cpu --backend hip")
    assert code == 2 and "mhc: hip did not run: there are no hip kernels for mhc" in printed


def test_bench(small, run, cxx):
    code, printed, _ = run(f"{BENCH} --providers eager torch.compile --json file")
    assert code == 0 and "torch.compile" in printed
    assert {m["provider"] for m in saved()["measurements"]} == {"eager", "torch.compile"}
    assert {m["direction"] for m in saved()["measurements"]} == {"forward", "backward", "both"}
    assert saved()["versions"]["torch"] == torch.__version__


def test_bench_says_what_is_missing(small, run, monkeypatch):
    monkeypatch.setattr(backends, "CXX", None)
    code, printed, _ = run(f"{BENCH} --peers --json file")
    assert code == 0 and saved()["complete"] is True
    assert {m["provider"] for m in saved()["measurements"]} == {"eager"}
    assert "torch.compile did not run: there is no C++ compiler" in printed
    assert all(peers.why_not(peer) is None or f"{peer.name} did not run: " in printed for peer in peers.PEERS)


def test_an_interrupted_bench_keeps_what_it_has(small, run, monkeypatch, cxx):
    monkeypatch.setattr(torch.compiler, "reset", Mock(side_effect=KeyboardInterrupt))
    code, printed, _ = run(f"{BENCH} --json file")
    assert code == 130 and saved()["complete"] is False
    assert [m["provider"] for m in saved()["measurements"]] == ["eager"] * 3
    assert saved()["not_measured"][-1]["reason"] == "interrupted"
    assert "mhc_forward_pre 9x2x8 bfloat16: torch.compile did not run: interrupted" in printed and "µs" in printed


def test_compare_exits_1_on_a_regression(small, run):
    assert run(f"{CHECK} --json a")[0] == 0
    first, *others = saved("a")["accuracy"]
    Path("b").write_text(json.dumps(saved("a") | {"accuracy": [first | {"passed": False}, *others]}))
    assert run("compare a a") == (0, "11 entries in both files, 0 regressions\n", "")
    code, printed, _ = run("compare a b")
    assert code == 1 and "fails: mhc_forward_pre 9x2x8 bfloat16 reference h_in" in printed


def test_help_and_version(run):
    for command in ("", "info", "check", "bench", "page", "compare", "diagnose", "convert", "hub"):
        code, printed, _ = run(f"{command} --help")
        assert code == 0 and cli.EXIT_CODES in printed
    assert run("--version") == (0, f"mhc-ops {mhc_ops.__version__}\n", "")


def test_the_documented_exit_codes_are_these():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").partition(" | ") for line in text.splitlines() if line.startswith("| ")]
    documented = {code: " ".join(words.replace("`", "").split()) for code, _, words in rows if code.isdigit()}
    listed = re.findall(r"^  (\d+) +(.+(?:\n {7}.+)*)", cli.EXIT_CODES, re.MULTILINE)
    assert documented == {code: " ".join(words.replace("`", "").split()) for code, words in listed}
    assert set(documented) == {"0", "1", "2", str(cli.INTERRUPTED), str(cli.PIPE_CLOSED)}


@pytest.mark.parametrize("command", ["", "nothing"])
def test_no_command(command, run):
    code, printed, said = run(command)
    assert (code, printed, said.count("\n")) == (2, "", 1) and said.startswith("mhc-ops: ")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("bench --providers trition", "argument --providers: invalid choice: 'trition'"),
        ("diagnose mhc_psot", "argument OP: invalid choice: 'mhc_psot'"),
        ("diagnose mhc_post --shape=2xx3", "argument --shape: "),
        ("diagnose mhc_post --shape 9999999x4x9999999", "argument --shape: 9999999x4x9999999: no device holds so many"),
        *((f"diagnose mhc_post --seed={n}", "argument --seed: ") for n in ("9" * 20, "-1", "0.5", "")),
        *((f"check --fuzz={seconds}", "argument --fuzz: ") for seconds in ("0", "nan")),
        ("check --fuzz=1 --case=mhc", "--fuzz draws cases of its own"),
        ("check --seed=3", "--seed goes with --fuzz or --misuse"),
        *((f"check --device={device}", f"argument --device: {device}: ") for device in ("cuda:99", "meta", "")),
        ("page one", "one of the arguments --markdown --svg is required"),
    ],
    ids=lambda text: text[:30],
)
def test_a_command_line_that_is_wrong(command, line, refused):
    assert refused(command).startswith(line)


@pytest.mark.parametrize("command", ["check", "bench"])
def test_no_case_of_this_name(small, command, refused):
    for text, answer in (("mhc_foward_pre", "did you mean 'mhc_forward_pre'"), ("typo", "there are cases of mhc_")):
        line = refused([command, "--device", "cpu", "--case", text, "--json", "file"])
        assert line.startswith(f"no case matches {text!r}: {answer}")


@pytest.mark.interpreted
def test_check_in_the_interpreter(small, run):
    """Also bf16, which triton's interpreter gets wrong by itself."""
    code, printed, _ = run("check --device cpu --backend triton")
    assert code == 0 and printed.endswith("11 passed, 0 failed\n")


@pytest.mark.parametrize(
    ("command", "variable", "value", "reason"),
    [
        ("info", "MHC_OPS_SEED", "seven", "'seven' is no whole number from 0 to 4611686018427387904"),
        ("check", "MHC_OPS_BACKEND", "cuda", "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
    ],
)
def test_an_environment_variable_that_is_wrong(command, variable, value, reason):
    environment = {**os.environ, variable: value}
    done = subprocess.run([sys.executable, "-m", "mhc_ops", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mhc-ops {command}: {variable}: {reason}\n"
