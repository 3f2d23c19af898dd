"""mhc-ops: what it prints and how it exits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mhc_ops
from mhc_ops import cli
from mhc_ops.core import device as devices
from mhc_ops.measure import bench, peers, selection, speed
from mhc_ops.testing import accuracy, cases

SMALL = (cases.Case(cases.MHC_FORWARD_PRE, (9,), 2, 8, torch.bfloat16),)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(selection, "CHECK", SMALL)
    monkeypatch.setattr(selection, "BENCH_CPU", SMALL)


def test_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in printed
    assert "mhc   reference  runs on" in printed
    assert "no: there are no hip kernels for mhc" in printed


def test_info_describes_every_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L40S")
    monkeypatch.setattr(devices, "of", lambda device: devices.Device("cuda", (8, 9), 99 << 10, 142))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for index in range(2):
        assert f"cuda:{index}    NVIDIA L40S: capability 8.9, 99 KB of shared memory, 142 multiprocessors\n" in printed


def test_check_passes(small, capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "reference"]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[0] == ["op", "backend", "cases", "results", "failed", "worst", "verdict"]
    *counted, worst, verdict = lines[2]
    assert (counted, verdict) == (["mhc_forward_pre", "reference", "1", "11", "0"], "PASS")
    assert 0 < float(worst) <= 1
    assert printed.out.endswith("11 passed, 0 failed\n")
    assert len(lines) < 10
    assert "check 1/1: mhc_forward_pre 9x2x8 bfloat16 reference" in printed.err
    assert cli.main(["check", "--device", "cpu", "--backend", "reference", "--rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "op and case backend output max error relative tolerance verdict"
    assert len([line for line in lines if line.startswith("mhc_forward_pre 9x2x8") and line.endswith("PASS")]) == 11


def test_the_page_shows_what_check_prints(capsys):
    """But for the error itself, which is the machine's."""
    text = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(op .*?)```", text, re.DOTALL)
    assert cli.main(["check", "--device", "cpu", "--backend", "reference", "--case", "sinkhorn"]) == 0
    without = [re.sub(r"\d\.\d\d", "", printed).replace("\n\n", "\n") for printed in (shown, capsys.readouterr().out)]
    assert without[0] == without[1]


def test_check_fails(small, capsys, monkeypatch):
    """A wrong h_post: exit 1, its row is shown, and none of those that pass."""
    from mhc_ops.mhc import reference

    right = reference.mhc_pre

    def wrong(x, *arguments):
        h_in, h_post, *rest = right(x, *arguments)
        return h_in, h_post if x.dtype == torch.float64 else h_post * 1.01, *rest

    monkeypatch.setattr(reference, "mhc_pre", wrong)
    assert cli.main(["check", "--device", "cpu", "--backend", "reference"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    failed = [words[-5] for words in lines if words[:2] == ["mhc_forward_pre", "9x2x8"]]
    assert "h_post" in failed
    assert "h_in" not in failed
    (summary,) = [words for words in lines if words[:2] == ["mhc_forward_pre", "reference"]]
    assert (summary[4], summary[-1]) == (str(len(failed)), "FAIL")
    assert float(summary[5]) > 100  # of what is allowed


def test_check_goes_on_after_a_crash(small, monkeypatch, tmp_path, capsys):
    """And takes only the cases that were asked for."""
    monkeypatch.setattr(selection, "CHECK", (cases.Case(cases.SINKHORN, (9,), 2, 0, torch.float32), *SMALL))
    right = accuracy.measure

    def crash(case, *arguments):
        if case.subject is cases.SINKHORN:
            raise OSError("no luck")
        return right(case, *arguments)

    monkeypatch.setattr(accuracy, "measure", crash)
    file = tmp_path / "check.json"
    arguments = ["check", "--device", "cpu", "--backend", "reference", "--json", str(file)]
    assert cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "sinkhorn 9x2x2 float32: reference did not run: OSError: no luck" in printed
    assert printed.endswith("11 passed, 0 failed, 1 cases crashed\n")
    assert len(json.loads(file.read_text())["accuracy"]) == 11
    assert cli.main([*arguments, "--case", "mhc_forward_pre"]) == 0


def test_check_of_a_backend_that_cannot_run(small, capsys):
    assert cli.main(["check", "--device", "cpu", "--backend", "hip"]) == 2
    printed = capsys.readouterr().out
    assert "mhc: hip did not run: there are no hip kernels for mhc" in printed


def test_bench(small, capsys, tmp_path, cxx):
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "--device", "cpu", "--providers", "eager", "torch.compile", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {m["provider"] for m in content["measurements"]} == {"eager", "torch.compile"}
    assert {m["direction"] for m in content["measurements"]} == {"forward", "backward", "both"}
    assert content["versions"]["torch"] == torch.__version__
    assert "torch.compile" in capsys.readouterr().out


def test_bench_says_what_is_missing(small, capsys, tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    monkeypatch.setattr(speed, "why_no_compiler", lambda: "no compiler")
    assert cli.main(["bench", "--device", "cpu", "--peers", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {m["provider"] for m in content["measurements"]} == {"eager"}
    assert content["complete"] is True
    printed = capsys.readouterr().out
    assert "torch.compile did not run: no compiler" in printed
    assert all(peers.why_not(peer) is None or f"{peer.name} did not run: " in printed for peer in peers.PEERS)


def test_an_interrupted_bench_keeps_what_it_has(small, monkeypatch, tmp_path, capsys, cxx):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    file = tmp_path / "bench.json"
    monkeypatch.setattr(bench.torch.compiler, "reset", interrupted)
    assert cli.main(["bench", "--device", "cpu", "--json", str(file)]) == 130
    content = json.loads(file.read_text())
    assert content["complete"] is False
    assert {m["provider"] for m in content["measurements"]} == {"eager"}
    assert len(content["measurements"]) == 3
    assert content["not_measured"][-1]["reason"] == "interrupted"
    printed = capsys.readouterr().out
    assert "mhc_forward_pre 9x2x8 bfloat16: torch.compile did not run: interrupted" in printed
    assert "µs" in printed


def test_an_interrupted_check_keeps_what_it_has(small, monkeypatch, tmp_path, capsys):
    right = cli.accuracy.measure

    def interrupted(case, backend, device):
        if case is not SMALL[0]:
            raise KeyboardInterrupt
        return right(case, backend, device)

    monkeypatch.setattr(selection, "CHECK", (*SMALL, cases.Case(cases.MHC_POST, (9,), 2, 8)))
    monkeypatch.setattr(cli.accuracy, "measure", interrupted)
    file = tmp_path / "check.json"
    assert cli.main(["check", "--device", "cpu", "--backend", "reference", "--json", str(file)]) == 130
    content = json.loads(file.read_text())
    assert content["complete"] is False
    assert len(content["accuracy"]) == 11


def test_compare_exits_1_on_a_regression(small, tmp_path, capsys):
    files = [tmp_path / name for name in ("a.json", "b.json")]
    arguments = ["check", "--device", "cpu", "--backend", "reference", "--json", str(files[0])]
    assert cli.main(arguments) == 0
    content = json.loads(files[0].read_text())
    content["accuracy"][0]["passed"] = False
    files[1].write_text(json.dumps(content))
    capsys.readouterr()
    assert cli.main(["compare", str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out == "11 entries in both files, 0 regressions\n"
    assert cli.main(["compare", str(files[0]), str(files[1])]) == 1
    assert "fails: mhc_forward_pre 9x2x8 bfloat16 reference h_in" in capsys.readouterr().out


def test_help_names_the_exit_codes(capsys):
    for command in ([], ["info"], ["check"], ["bench"], ["page"], ["compare"], ["diagnose"], ["convert"], ["hub"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        printed = capsys.readouterr().out
        assert "130  interrupted" in printed
        assert "141  " in printed


def test_the_documented_exit_codes_are_these():
    text = (Path(__file__).parents[2] / "docs" / "measure.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").partition(" | ") for line in text.splitlines() if line.startswith("| ")]
    documented = {code: " ".join(words.replace("`", "").split()) for code, _, words in rows if code.isdigit()}
    listed = re.findall(r"^  (\d+) +(.+(?:\n {7}.+)*)", cli.EXIT_CODES, re.MULTILINE)
    assert documented == {code: " ".join(words.replace("`", "").split()) for code, words in listed}
    assert set(documented) == {"0", "1", "2", str(cli.INTERRUPTED), str(cli.PIPE_CLOSED)}


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"mhc-ops {mhc_ops.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--providers", "trition"],
        ["bench", "--providers"],
        *(["diagnose", "mhc_post", f"--seed={seed}"] for seed in ("9" * 20, "9" * 5000, "-1", "0.5", "")),
        *(["check", f"--fuzz={seconds}"] for seconds in ("0", "-1", "nan")),
        ["check", "--fuzz=1", "--seed=" + "9" * 20],
        ["check", "--case"],
        ["compare", "one"],
        ["page", "one"],
        ["diagnose"],
        ["convert", "one", "two"],
        ["hub"],
        ["nothing"],
        [],
    ],
)
def test_a_command_line_that_is_wrong(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(" ".join(["mhc-ops", *arguments[: arguments[:1] != ["nothing"]]]) + ": ")


@pytest.mark.parametrize("command", ["check", "bench"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("mhc_foward_pre", "did you mean 'mhc_forward_pre'"),
        ("mhc_forward_pre 9x2x8 bfloat61", "did you mean 'mhc_forward_pre 9x2x8 bfloat16'"),
        ("bf16", "did you mean 'bfloat16'?"),
        ("typo", "there are cases of mhc_forward_pre"),
        ("mhc_.*", "there are cases of mhc_forward_pre"),
    ],
)
def test_no_case_of_this_name(small, command, text, answer, tmp_path, capsys):
    file = tmp_path / "file"
    assert cli.main([command, "--device", "cpu", "--case", text, "--json", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"mhc-ops {command}: no case matches {text!r}: ")
    assert answer in printed.err
    assert not file.exists()


def test_providers_of_two_options(small, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run", lambda request, found, save: asked.append(request.providers))
    options = ["--providers", "eager", "--providers", "torch.compile", "eager"]
    assert cli.main(["bench", "--device", "cpu", *options]) == 2
    assert asked == [["eager", "torch.compile", "eager"]]


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta", "", "mps:7", "hpu"])
def test_device_that_is_not_there(device, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["check", "--device", device])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert f"argument --device: {device}:" in printed
    assert printed.count("\n") == 1


@pytest.mark.interpreted
def test_check_in_the_interpreter(small, capsys):
    """Also bf16, which triton's interpreter gets wrong by itself."""
    assert cli.main(["check", "--device", "cpu", "--backend", "triton"]) == 0
    assert capsys.readouterr().out.endswith("11 passed, 0 failed\n")


WITHOUT_EXTRAS = """
import runpy, sys
sys.modules |= dict.fromkeys(("jinja2", "markupsafe", "pygments"))  # as if they were not installed
runpy.run_module("mhc_ops", run_name="__main__")
"""


def without_extras(*words):
    return subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *words], capture_output=True, text=True, timeout=800)


def test_what_needs_no_extra(tmp_path):
    assert "mhc   reference  runs on" in without_extras("info").stdout
    checked = without_extras("check", "--device", "cpu", "--backend", "reference", "--case", "sinkhorn 173x1x1")
    assert checked.stdout.endswith("2 passed, 0 failed\n"), checked.stderr
    file, words = tmp_path / "bench.json", ["--device", "cpu", "--providers", "eager", "--case", "mhc_post 256"]
    timed = without_extras("bench", *words, "--json", str(file))
    assert timed.returncode == 0, timed.stderr
    assert len(json.loads(file.read_text())["measurements"]) == 3


@pytest.mark.parametrize(
    "words",
    [
        ["page", "results.json", "--html", "page"],
        ["page", "results.json", "--svg", "page"],
        ["bench", "--device", "cpu", "--html", "page"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_what_needs_an_extra_says_so_first(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (tmp_path / "results.json").write_text('{"accuracy": []}')
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"mhc-ops {words[0]}: {words[-2]} needs jinja2")
    assert line.endswith("pip install mhc-ops[bench]")
    assert not (tmp_path / "page").exists()


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
