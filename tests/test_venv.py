"""scripts/venv.sh: which PyTorch ./run.sh and ./run_tests.sh take, above all where there is an AMD GPU."""

import pytest
from sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


@pytest.fixture(params=["run.sh", "run_tests.sh"])
def script(request):
    return request.param


EXTRAS = {"run.sh": "triton,bench", "run_tests.sh": "test"}


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


@pytest.mark.parametrize("cuda_torch", [False, True])
def test_a_machine_without_an_amd_gpu_takes_pypi(sandbox, script, cuda_torch):
    if cuda_torch:
        sandbox.torch(hip=None)
    assert_takes_pypi(sandbox.run(script), EXTRAS[script])


def test_an_amd_gpu_without_its_torch_stops(sandbox, script):
    sandbox.kfd.touch()
    done = sandbox.run(script)
    assert done.code == 1
    assert not installs(done) and not done.called("pytest") and not done.called("mhc-ops")
    for choice in ("PYTHON=", "TORCH_INDEX=", "CPU=1", str(sandbox.kfd)):
        assert choice in done.said
    assert len(done.said.splitlines()) <= 5


@pytest.mark.parametrize("device_file", [False, True])
def test_a_rocm_torch_is_used_and_left_alone(sandbox, script, device_file):
    sandbox.torch(hip="6.4.43482")
    if device_file:
        sandbox.kfd.touch()
    done = sandbox.run(script)
    assert_leaves_torch_alone(done)
    assert done.called("python -m venv") == ["python -m venv --clear --system-site-packages .venv"]
    assert not any("torch" in call.split() for call in installs(done))
    assert list(sandbox.folder.glob(".venv/lib/python3*/site-packages/packages_of_python.pth"))


def test_the_index_that_is_named_is_used(sandbox, script):
    sandbox.kfd.touch()
    sandbox.torch(hip="6.4.43482")  # as if from that index: the stub of pip installs nothing
    done = sandbox.run(script, TORCH_INDEX="https://index.example/rocm")
    assert_leaves_torch_alone(done)
    assert installs(done)[0].endswith("--index-url https://index.example/rocm torch")
    assert done.called("python -m venv") == ["python -m venv --clear .venv"]


def test_the_cpu_is_chosen_by_name_alone(sandbox, script):
    sandbox.kfd.touch()
    assert_takes_pypi(sandbox.run(script, CPU="1"), EXTRAS[script])


def test_a_gpu_that_torch_does_not_see_stops(sandbox, script):
    """As where the user may not open the device file."""
    sandbox.kfd.touch()
    sandbox.torch(hip="6.4.43482", sees_gpu=False)
    done = sandbox.run(script)
    assert done.code == 1
    assert not done.called("pytest") and not done.called("mhc-ops")
    assert "sees no GPU" in done.said and "CPU=1" in done.said


def test_an_nvidia_gpu_beside_an_amd_processor_takes_pypi(sandbox, script):
    """Graphics in an AMD processor have the device file too."""
    sandbox.kfd.touch()
    sandbox.stub("nvidia-smi", "#!/bin/sh\necho 'GPU 0: stub'\n")
    assert_takes_pypi(sandbox.run(script), EXTRAS[script])


def test_another_choice_makes_another_venv(sandbox):
    sandbox.torch(hip="6.4.43482")
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
    done = sandbox.run("run.sh")
    assert done.code == 1 and "needs Python 3.10 or newer" in done.said and "Python 3.9.1" in done.said
