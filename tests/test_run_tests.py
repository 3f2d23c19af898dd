"""./run_tests.sh runs every step, whatever failed before, and its exit code tells of all of them."""

import pytest
from sandbox import Sandbox

STEPS = ["ruff check .", "ruff format --check .", "mypy ", "pytest", "pytest"]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def steps(done):
    return [call for call in done.calls if call.split()[0] in ("ruff", "mypy", "pytest")]


def test_all_is_well(sandbox):
    done = sandbox.run("run_tests.sh")
    assert done.code == 0, done.said
    assert [call.startswith(step) for call, step in zip(steps(done), STEPS)] == [True] * len(STEPS)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"RUFF": "1"}, "ruff check"),
        ({"MYPY": "2"}, "mypy"),
        ({"COMPILED": "1"}, "pytest -m not interpreted"),
        ({"INTERPRETED": "1"}, "pytest -m interpreted"),
        ({"COMPILED": "1", "INTERPRETED": "1"}, "pytest -m interpreted"),
        ({"COMPILED": "5"}, "pytest -m not interpreted"),
    ],
    ids=str,
)
def test_what_fails_keeps_nothing_else_from_running(sandbox, broken, named):
    done = sandbox.run("run_tests.sh", **broken)
    assert len(steps(done)) == len(STEPS)
    assert done.code == 1
    assert named in done.said.splitlines()[-1]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(("0", "5"), 0), (("5", "0"), 0), (("5", "5"), 1), (("1", "5"), 1), (("5", "1"), 1)],
    ids=str,
)
def test_a_selection_may_leave_one_run_without_tests(sandbox, codes, expected):
    done = sandbox.run("run_tests.sh", "-k", "a b", COMPILED=codes[0], INTERPRETED=codes[1])
    assert done.code == expected
    assert all(call.endswith("-k a b") for call in done.called("pytest"))
    assert len(done.called("pytest")) == 2


def test_all_runs_what_is_thorough_too(sandbox):
    quick, whole = sandbox.run("run_tests.sh"), sandbox.run("run_tests.sh", "--all", "-k", "a")
    assert all("and not thorough" in call for call in quick.called("pytest"))
    assert [call.endswith("interpreted -k a") for call in whole.called("pytest")] == [True, True]
