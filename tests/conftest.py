"""Where a test runs: on the CPU, in Triton's interpreter, or on a GPU."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

import mhc_ops
from mhc_ops.core import call
from mhc_ops.core.backend import _INTERPRETED, CXX
from mhc_ops.measure import training_step
from mhc_ops.testing import cases

# torch keeps what torch.compile made by its source, not by ATEN_CPU_CAPABILITY: code for one set of vector instructions
# would be taken for another, and give garbage or not compile. Nor by the ops that a backward calls: where they take
# other arguments now, what was kept calls them wrongly.
ops = b"".join(path.read_bytes() for path in sorted(Path(mhc_ops.__file__).parent.rglob("contracts.py")))
kept = f"mhc_ops_inductor_{os.getuid()}_{torch.backends.cpu.get_cpu_capability()}_{hashlib.sha256(ops).hexdigest()[:8]}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / kept))


def pytest_configure():
    if cases.WRONG_SEED:
        raise pytest.UsageError(cases.WRONG_SEED)


def pytest_report_header():
    return f"base seed of all cases: {cases.SEED} (MHC_OPS_SEED)"


# Each line names a file and, by a regular expression, the tests of it that only ./run_tests.sh --all runs.
LINES = Path(__file__).with_name("thorough.txt").read_text(encoding="utf-8").splitlines()
THOROUGH = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreted")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items, config):
    mark_thorough(items, whole=not any("::" in argument for argument in config.args))
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    compiled = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, as in the second run of ./run_tests.sh")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
            item.add_marker(pytest.mark.thorough)  # thousands that say so take half a minute
        if "interpreted" in item.keywords and not _INTERPRETED:
            item.add_marker(compiled)


def mark_thorough(items, whole):
    """whole: files were collected with all of their tests, so that a line without any has gone stale."""
    tests = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        tests.setdefault(file, []).append((name, item))
    for file, pattern in THOROUGH:
        found = [item for name, item in tests.get(file, ()) if re.search(pattern, name)]
        for item in found:
            item.add_marker(pytest.mark.thorough)
        if whole and file in tests and not found:
            raise pytest.UsageError(f"tests/thorough.txt: no test of {file} is named as {pattern}")


@pytest.fixture(params=[INTERPRETED, pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")])
def kernel_device(request):
    """Where Triton kernels can be executed."""
    return request.param


@pytest.fixture(autouse=True)
def no_earlier_calls():
    """A call like an earlier one is neither checked nor prepared again; tests run in any order."""
    call.forget()


@pytest.fixture(autouse=True)
def no_training_steps(monkeypatch):
    """A bench of all cases leaves them out, but in their own tests: they would take longer than all the others."""
    monkeypatch.setattr(training_step, "SIZES_CPU", ())


@pytest.fixture
def cxx():
    """torch.compile for CPU tensors needs a C++ compiler."""
    if not CXX:
        pytest.skip("there is no C++ compiler")


@pytest.fixture
def poisoned(monkeypatch):
    """Fill every freshly allocated tensor with NaN, so that an element never written shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
