"""What the commands write and read: links, devices, pipes, files that cannot be, and who says so when."""

import json
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from mhc_ops.measure import bench, results, selection
from mhc_ops.testing import accuracy, cases

CHECK = "check --device cpu --backend reference --json"
BENCH = "bench --device cpu --providers eager"
PAGE = "page results --markdown"
PLACES = {"nowhere/file": "No such file", "folder": "is a folder", "file/file": "Not a directory", "": "is a folder"}
PLACES |= {"loop": "symbolic links", "/proc/self/file": "No such file or directory"}  # the last refuses even root
WRITING = {CHECK: '"command": "check"', f"{BENCH} --json": '"command": "bench"', PAGE: "### All results"}


@pytest.fixture(autouse=True)
def small_files(small, here):
    """A file of results that measured nothing, one without content, and what cannot be written."""
    results.write(results.begin("bench"), Path("results"))
    Path("file").touch()
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")


@pytest.fixture
def nothing_may_run(monkeypatch):
    never = Mock(side_effect=AssertionError("the work has begun"))
    monkeypatch.setattr(accuracy, "measure", never)
    monkeypatch.setattr(bench, "run", never)


@pytest.mark.parametrize(("command", "text"), WRITING.items())
def test_a_pipe_gets_one_text(command, text, small, run, monkeypatch):
    """Also where a run saves often."""
    monkeypatch.setattr(selection, "CHECK", (small, cases.Case(cases.MHC_POST, (4,), 2, 8)))
    os.mkfifo("fifo")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("fifo").read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert run(f"{command} fifo")[0] == 0
    reader.join(timeout=300)
    assert Path("fifo").is_fifo() and read[0].count(text) == 1


@pytest.mark.parametrize("command", [*WRITING, "page results --svg"])
@pytest.mark.parametrize(("place", "reason"), PLACES.items())
def test_a_place_that_cannot_be_written(command, place, reason, refused, nothing_may_run):
    assert reason in refused([*command.split(), place])


def test_files_that_do_not_go_together(refused, nothing_may_run):
    Path("link").symlink_to("results")
    for words in ("--svg link", "--markdown link", "link --markdown page"):
        assert refused(f"page results {words}") == "results and link are one file"
    results.write(results.begin("bench"), Path("more"))
    assert refused("page results more --svg page") == "--svg draws one file of results; --markdown takes several"


TIMED = {"case": "op 8x8", "provider": "triton", "direction": "both"}
TIMED |= {"microseconds": 2.0, "bytes": 3.0, "copy_microseconds": 1.0}
ROW = {"case": "op 8x8", "backend": "triton", "output": "y", "passed": True}
ROW |= {"max_error": 1.0, "relative_error": 0.1, "tolerance": 1.0}


def written(**content):
    return json.dumps({"format": 2, **content})


@pytest.mark.parametrize(
    "text",
    [
        *(written(measurements=[{name: TIMED[name] for name in TIMED if name != field}]) for field in TIMED),
        *(written(accuracy=[{name: ROW[name] for name in ROW if name != field}]) for field in ROW),
        *(written(steps=steps) for steps in (1, None, [1], [None], [{}])),
        *("[]", "{}", '{"format": 1}', '{"format": "2"}', "{"),
    ],
)
def test_a_file_that_another_program_wrote(text, refused):
    """Each is one line before anything is drawn or compared."""
    Path("file").write_text(text)
    for command in ("compare file file", "page file --markdown new"):
        assert refused(command).startswith("file: ")


@pytest.mark.parametrize("place", ["nowhere", "folder", "file/file", "loop", "x" * 300])
def test_a_file_that_is_not_there(place, refused):
    for command in (f"page {place} --markdown page", f"compare {place} {place}"):
        assert refused(command).startswith(f"{place}: ")


def test_compare_and_page_of_files_that_differ(run):
    """A hostile name is printed as it is written. A check and a bench have nothing in common."""
    Path("bench").write_text(written(measurements=[TIMED]))
    Path("more").write_text(written(measurements=[TIMED, {**TIMED, "case": "\x1b[2J\n"}]))
    Path("check").write_text(written(command="check", accuracy=[ROW]))
    code, printed, _ = run("compare bench more")
    assert code == 0 and "missing: \\x1b[2J\\n triton: only in the second file: both\n" in printed
    code, printed, _ = run("compare bench check")
    assert code == 2 and printed.endswith("0 entries in both files, 0 regressions\n")
    assert run("page check --markdown page")[0] == 0
    assert "1 passed, 0 failed" in Path("page").read_text(encoding="utf-8")
