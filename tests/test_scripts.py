"""run.sh and run_tests.sh: which PyTorch they install, above all beside an AMD GPU, and which steps the tests have."""

import pytest
from sandbox import Sandbox

EXTRAS = {"run.sh": "triton,bench", "run_tests.sh": "test"}
STEPS = ["ruff check .", "ruff format --check .", "mypy ", "pytest", "pytest"]
ROCM = "6.4.43482"


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


@pytest.fixture(params=EXTRAS)
def script(request):
    return request.param


def installs(done):
    return done.called("python -m pip install")


def assert_takes_pypi(done, extras):
    assert done.code == 0, done.said
    assert len(installs(done)) == 1 and installs(done)[0].endswith(f"-c constraints.txt -e .[{extras}]")
    assert done.called("python -m venv") == ["python -m venv --clear .venv"]


def assert_leaves_torch_alone(done):
    assert done.code == 0, done.said
    assert any("--ignore-installed" in call for call in installs(done))  # every tool has its command in .venv
    assert any(call.endswith("--no-deps -e .") for call in installs(done))
    assert not any("[test]" in call or "-c constraints.txt" in call for call in installs(done))


def assert_stops(done, *words):
    assert done.code == 1 and len(done.said.splitlines()) <= 5
    assert not done.called("pytest") and not done.called("mhc-ops")
    assert all(word in done.said for word in words)


@pytest.mark.parametrize(
    "machine", ["no GPU", "CUDA's torch", "CPU=1 beside an AMD GPU", "an NVIDIA GPU in AMD's graphics"]
)
def test_pypi_is_taken(sandbox, script, machine):
    """An AMD processor's graphics have the device file too: an NVIDIA GPU beside them decides."""
    if machine == "CUDA's torch":
        sandbox.torch(hip=None)
    elif machine != "no GPU":
        sandbox.kfd.touch()
    if "NVIDIA" in machine:
        sandbox.stub("nvidia-smi", "#!/bin/sh\necho 'GPU 0: stub'\n")
    assert_takes_pypi(sandbox.run(script, **({"CPU": "1"} if "CPU=1" in machine else {})), EXTRAS[script])


@pytest.mark.parametrize("has_torch", [False, True])
def test_an_amd_gpu_that_cannot_be_used_stops(sandbox, script, has_torch):
    """No PyTorch for it, or one that may not open its device file."""
    sandbox.kfd.touch()
    if has_torch:
        sandbox.torch(hip=ROCM, sees_gpu=False)
    words = ["sees no GPU"] if has_torch else ["PYTHON=", "TORCH_INDEX=", str(sandbox.kfd)]
    done = sandbox.run(script)
    assert_stops(done, "CPU=1", *words)
    assert bool(installs(done)) == has_torch


@pytest.mark.parametrize("device_file", [False, True])
def test_a_rocm_torch_is_used_and_left_alone(sandbox, script, device_file):
    sandbox.torch(hip=ROCM)
    if device_file:
        sandbox.kfd.touch()
    done = sandbox.run(script)
    assert_leaves_torch_alone(done)
    assert done.called("python -m venv") == ["python -m venv --clear --system-site-packages .venv"]
    assert not any("torch" in call.split() for call in installs(done))
    assert list(sandbox.folder.glob(".venv/lib/python3*/site-packages/packages_of_python.pth"))


def test_the_index_that_is_named_is_used(sandbox, script):
    sandbox.kfd.touch()
    sandbox.torch(hip=ROCM)  # as if from that index: the stub of pip installs nothing
    done = sandbox.run(script, TORCH_INDEX="https://index.example/rocm")
    assert_leaves_torch_alone(done)
    assert installs(done)[0].endswith("--index-url https://index.example/rocm torch")
    assert done.called("python -m venv") == ["python -m venv --clear .venv"]


def test_another_choice_makes_another_venv(sandbox):
    sandbox.torch(hip=ROCM)
    assert_leaves_torch_alone(sandbox.run("run.sh"))
    again = sandbox.run("run.sh")
    assert again.code == 0 and not installs(again) and not again.called("python -m venv")
    assert_takes_pypi(sandbox.run("run.sh", CPU="1"), EXTRAS["run.sh"])


def test_the_tests_install_what_the_check_did_not(sandbox):
    assert len(installs(sandbox.run("run.sh"))) == 1
    rest = sandbox.run("run_tests.sh")
    assert installs(rest)[0].endswith("-e .[test]") and not rest.called("python -m venv")
    assert not installs(sandbox.run("run.sh")) and not installs(sandbox.run("run_tests.sh"))


def test_an_old_python_is_refused(sandbox):
    sandbox.stub("python", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    assert_stops(sandbox.run("run.sh"), "needs Python 3.10 or newer", "Python 3.9.1")


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({}, ""),
        ({"RUFF": "1"}, "ruff check"),
        ({"MYPY": "2"}, "mypy"),
        ({"COMPILED": "1"}, "pytest -m not interpreted"),
        ({"INTERPRETED": "1"}, "pytest -m interpreted"),
        ({"COMPILED": "1", "INTERPRETED": "1"}, "pytest -m interpreted"),
        ({"COMPILED": "5"}, "pytest -m not interpreted"),
    ],
    ids=str,
)
def test_every_step_runs_whatever_fails(sandbox, broken, named):
    done = sandbox.run("run_tests.sh", **broken)
    steps = [call for call in done.calls if call.split()[0] in ("ruff", "mypy", "pytest")]
    assert [call.startswith(step) for call, step in zip(steps, STEPS, strict=True)] == [True] * len(STEPS)
    assert done.code == bool(named) and named in (done.said.splitlines() or [""])[-1]


@pytest.mark.parametrize("codes", ["0 5", "5 0", "5 5", "1 5", "5 1"])
def test_a_selection_may_leave_one_run_without_tests(sandbox, codes):
    compiled, interpreted = codes.split()
    done = sandbox.run("run_tests.sh", "-k", "a b", COMPILED=compiled, INTERPRETED=interpreted)
    assert done.code == (codes not in ("0 5", "5 0"))
    assert [call.endswith("-k a b") for call in done.called("pytest")] == [True, True]


def test_all_runs_what_is_thorough_too(sandbox):
    quick, whole = sandbox.run("run_tests.sh"), sandbox.run("run_tests.sh", "--all", "-k", "a")
    assert all("and not thorough" in call for call in quick.called("pytest"))
    assert [call.endswith("interpreted -k a") for call in whole.called("pytest")] == [True, True]
