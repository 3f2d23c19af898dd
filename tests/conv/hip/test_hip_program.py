"""run_channellast_test.sh and its program, in the CPU build."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import hip_toolchain as toolchain
import pytest

from mhc_ops.conv.hip import build

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "program" / "channellast_test.cpp"
FAST = f"-O1 {toolchain.WIDTH_4} {toolchain.FP32}"


def script(*arguments, flags=FAST, root=ROOT, **settings):
    environment = {**os.environ, "CONV_TARGET": "cpu", "CONV_FLAGS": flags, **settings}
    command = [root / "run_channellast_test.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


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
    compile_it = (build.cpu_compiler(), *build.CPU_FLAGS, f"-I{build.SOURCE}", PROGRAM)
    toolchain.run(*compile_it, "-x", "none", library, f"-Wl,-rpath,{library.parent}", "-o", program)
    printed = toolchain.run(program, 1)
    assert "Accuracy Summary: 6 / 6 PASSED" in printed
    passed, cases = map(int, re.search(r"More cases: (\d+) / (\d+) PASSED", printed).groups())
    assert passed == cases > 250


def test_script_and_its_program(tmp_path):
    """Here the threads of a block run last to first: a result that depends on their order would differ."""
    done = script("--all", flags=f"{FAST} -DMHC_OPS_CPU_REVERSED", KEEP=str(tmp_path / "kept"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Building for cpu" in done.stdout and "Accuracy Summary: 6 / 6 PASSED" in done.stdout
    assert re.search(r"Tiny: batch=.*\n  dx: max_diff=\d\.\d{3}e[+-]\d\d, errors=0/\d+\n", done.stdout)
    rows = done.stdout.partition("Mean(ms)")[2].splitlines()[1:]
    assert len(rows) == 2 * (6 + 2) and all(row.endswith("%") for row in rows)
    program = tmp_path / "kept" / "channellast_test"
    for word in ("abc", "1x", "", "-1", "3"):
        said = subprocess.run([program, word], capture_output=True, text=True)
        assert (said.returncode, said.stdout) == (2, "") and said.stderr.startswith("usage: "), word


def test_a_wrong_kernel_fails(tmp_path):
    """In a copy, where dweight is summed from the taps in reverse."""
    for folder in (build.SOURCE, PROGRAM.parent):
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT))
    shutil.copy(ROOT / "run_channellast_test.sh", tmp_path)
    kernel = tmp_path / build.SOURCE.relative_to(ROOT) / "conv_bwd.h"
    right = "dweight[k][i] += g[r + S][i] * (counts(S, k) ? window[r + k][i] : 0.0f);"
    assert kernel.read_text().count(right) == 1
    kernel.write_text(kernel.read_text().replace(right, "dweight[k][i] += g[r + S][i] * window[r + S - k][i];"))
    done = script("-a", root=tmp_path)
    assert done.returncode == 1 and "Status: FAILED" in done.stdout
    assert "Accuracy Summary: 0 / 6 PASSED" in done.stdout


def test_a_launch_has_fewer_threads_than_hip_can_count():
    """2^32 in truth; with few tokens a wave and a limit of 200,000 the largest cases need several launches."""
    limit = "-DMHC_OPS_CPU_THREADS_OF_LAUNCH=200000 -DMHC_CONV_THREADS_OF_LAUNCH=200000"
    done = script("-a", flags=f"{FAST} {limit} -DMHC_CONV_FWD_TOKENS=1 -DMHC_CONV_BWD_TOKENS=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 / 6 PASSED" in done.stdout


def test_sanitizers():
    flags = f"-O0 {toolchain.WIDTH_4} {toolchain.NO_FP16} -fsanitize=address,undefined -fno-sanitize-recover=all"
    done = script("-a", flags=flags)
    missing = re.search(r".*cannot find.*(asan|ubsan).*", done.stderr)
    if missing:
        pytest.skip(f"needs the sanitizers: {missing[0]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "6 / 6 PASSED" in done.stdout


def test_options():
    for arguments, code in ((["--help"], 0), (["-h"], 0), (["--fast"], 2), (["-a", "-p"], 2)):
        done = script(*arguments)
        assert done.returncode == code and "usage: run_channellast" in (done.stderr if code else done.stdout)
