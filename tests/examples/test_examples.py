"""The examples run as the README says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)


def test_train_block():
    done = run(EXAMPLES / "train_block.py", "--device", "cpu", "--D", 64, "--tokens", 128, "--steps", 100)
    assert done.returncode == 0, done.stderr
    assert "step   99" in done.stdout


@pytest.mark.gpu
def test_train_block_on_a_gpu():
    done = run(EXAMPLES / "train_block.py", "--device", "cuda", "--steps", 100)
    assert done.returncode == 0, done.stderr
