"""One lookup of hipcc for build.py and run_channellast_test.sh."""

import os
import subprocess
from pathlib import Path

import pytest

from mhc_ops.conv.hip import build

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "run_channellast_test.sh"


def executable(path, text="#!/bin/sh\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Without any hipcc, nvcc or AMD GPU."""
    for name in ("ROCM_PATH", "ROCM_HOME", "CONV_TARGET", "CONV_FLAGS", "KEEP"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "bash", "env", "dirname", "basename", "grep", "head", "tr", "mktemp", "rm", "mkdir"):
        (tools / tool).symlink_to(next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / tool).exists()))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("KFD", str(tmp_path / "kfd"))
    return tmp_path


def script():
    return subprocess.run([SCRIPT, "-a"], capture_output=True, text=True)


@pytest.mark.parametrize("where", ["ROCM_PATH", "ROCM_HOME", "PATH"])
def test_both_find_it(clean, monkeypatch, where):
    """What is named comes before what is in PATH."""
    if where != "PATH":
        executable(clean / "tools" / "hipcc")
    hipcc = executable(clean / "rocm" / "bin" / "hipcc", "#!/bin/sh\necho compiled by the stub\nexit 7\n")
    executable(clean / "rocm" / "bin" / "rocminfo", "#!/bin/sh\necho '  Name:  gfx942'\n")
    rocm = str(clean / "rocm")
    monkeypatch.setenv(where, f"{os.environ['PATH']}:{rocm}/bin" if where == "PATH" else rocm)
    assert build.hip_compiler() == str(hipcc)
    done = script()
    assert done.returncode == 7
    assert f"Building for hip: {hipcc} -x hip" in done.stdout and "--offload-arch=gfx942" in done.stdout


@pytest.mark.skipif(Path("/opt/rocm/bin/hipcc").exists(), reason="there is a hipcc in /opt/rocm")
def test_an_amd_gpu_without_hipcc_is_an_error(clean, monkeypatch):
    with pytest.raises(RuntimeError, match=r"^causal_conv1d: there is no hipcc: looked in \$ROCM_PATH/bin"):
        build.hip_compiler()
    (clean / "kfd").touch()
    executable(clean / "tools" / "c++", "#!/bin/sh\nexit 7\n")
    done = script()
    assert done.returncode == 2 and "there is no hipcc" in done.stderr and "Building" not in done.stdout
    monkeypatch.setenv("CONV_TARGET", "cpu")
    done = script()
    assert done.returncode == 7 and "Building for cpu" in done.stdout
