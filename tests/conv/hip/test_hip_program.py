"""run_channellast_test.sh and the program behind it, in its CPU build."""

import os
import re
import subprocess
from pathlib import Path

import hip_toolchain as toolchain
import pytest

from mhc_ops.conv.hip import build

ROOT = Path(__file__).parents[3]
FAST = f"-O1 {toolchain.WIDTH_4} {toolchain.FP32}"
PRESETS = ("Tiny", "Small", "Medium", "Large", "No Bias", "With SiLU")


def script(*arguments, flags=FAST):
    environment = {**os.environ, "CONV_TARGET": "cpu", "CONV_FLAGS": flags}
    return subprocess.run(
        [ROOT / "run_channellast_test.sh", *arguments], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        return build.cpu_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_every_case(tmp_path):
    """All types and widths, by the library that CPU tensors use."""
    library = build.compiled((build.cpu_compiler(), *build.CPU_FLAGS))
    program = tmp_path / "channellast_test"
    source = build.SOURCE / "channellast_test.cpp"
    toolchain.run(
        build.cpu_compiler(),
        *build.CPU_FLAGS,
        source,
        "-x",
        "none",
        library,
        f"-Wl,-rpath,{library.parent}",
        "-o",
        program,
    )
    printed = toolchain.run(program, 1)
    assert "Accuracy Summary: 6 / 6 PASSED" in printed
    passed, cases = map(int, re.search(r"More cases: (\d+) / (\d+) PASSED", printed).groups())
    assert passed == cases > 250


def test_script_says_what_it_does():
    """Here the threads of a block run last to first: a result that depends on their order would differ."""
    done = script("--all", flags=f"{FAST} -DMHC_OPS_CPU_REVERSED")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Building for cpu" in done.stdout
    number = r"max_diff=\d\.\d{3}e[+-]\d\d, errors=0/\d+"
    for name in PRESETS:
        of_bias = "" if name == "No Bias" else rf"  dbias: {number}\n"
        lines = rf"{name}: batch=.*\n  dx: {number}\n  dweight: {number}\n{of_bias}  y: {number}\n  Status: PASSED\n"
        assert re.search(lines, done.stdout), name
    assert "Accuracy Summary: 6 / 6 PASSED" in done.stdout
    assert re.search(r"Configuration +Mean\(ms\) +Min\(ms\) +BW\(GB/s\)", done.stdout)
    assert len(re.findall(r"% *$", done.stdout, re.M)) == 2 * (len(PRESETS) + 2)


def test_a_wrong_kernel_fails():
    done = script("-a", flags=f"{FAST} -DMHC_OPS_PLANT_ERROR")
    assert done.returncode != 0
    assert "Status: FAILED" in done.stdout
    assert "Accuracy Summary: 0 / 6 PASSED" in done.stdout


def test_sanitizers():
    flags = f"-O0 {toolchain.WIDTH_4} {toolchain.NO_FP16} -fsanitize=address,undefined -fno-sanitize-recover=all"
    done = script("-a", flags=flags)
    missing = re.search(r".*cannot find.*(asan|ubsan).*", done.stderr)
    if missing:
        pytest.skip(f"needs the sanitizers: {missing[0]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "6 / 6 PASSED" in done.stdout


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["-h"], 0), (["--fast"], 2), (["-a", "-p"], 2)])
def test_options(arguments, code):
    done = script(*arguments)
    assert done.returncode == code
    assert "usage: run_channellast_test.sh [--all | --accuracy | -a" in (done.stderr if code else done.stdout)
