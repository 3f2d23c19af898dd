"""What the commands write and read: links, devices, pipes, files that cannot be, and who says so when."""

import json
import os
import sys
import threading

import pytest

from mhc_ops import cli
from mhc_ops.measure import bench, results, selection
from mhc_ops.testing import accuracy, cases

SMALL = (cases.Case(cases.MHC_POST, (3,), 2, 8),)
CHECK = ["check", "--device", "cpu", "--backend", "reference"]
WRITING = (
    [*CHECK, "--json"],
    ["bench", "--device", "cpu", "--providers", "eager", "--json"],
    ["bench", "--device", "cpu", "--providers", "eager", "--html"],
)
IDS = [f"{command[0]} {command[-1]}" for command in WRITING]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(selection, "CHECK", SMALL)
    monkeypatch.setattr(selection, "BENCH_CPU", SMALL)


@pytest.fixture
def nothing_may_run(monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(accuracy, "measure", never)
    monkeypatch.setattr(bench, "run", never)


def refused(command, capsys):
    """The one line that says so."""
    try:
        code = cli.main(command)
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"mhc-ops {command[0]}: ")
    return line


@pytest.mark.parametrize("command", WRITING, ids=IDS)
def test_a_pipe_gets_one_text(command, tmp_path, monkeypatch):
    """Also where a run saves often."""
    monkeypatch.setattr(selection, "CHECK", (*SMALL, cases.Case(cases.MHC_POST, (4,), 2, 8)))
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert cli.main([*command, str(fifo)]) == 0
    reader.join(timeout=300)
    assert fifo.is_fifo()
    if command[-1] == "--json":
        assert json.loads(read[0])["command"] == command[0]
    else:
        assert read[0].rstrip().endswith("</html>")


@pytest.mark.parametrize("into", ["a pipe", "a file"])
def test_stdout_by_name(into, tmp_path, monkeypatch):
    """A file that stdout is redirected to is not replaced: it gets what is printed and the JSON."""
    if into == "a pipe":
        reading, writing = os.pipe()
    else:
        writing = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        reading = os.open(tmp_path / "file", os.O_RDONLY)
    with os.fdopen(writing, "w") as stdout, os.fdopen(reading) as reader:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main([*CHECK, "--json", f"/dev/fd/{writing}"]) == 0
        stdout.close()
        printed = reader.read()
    summary, rest = printed.split("5 passed, 0 failed\n")
    assert summary.startswith("op ")
    assert json.loads(rest)["command"] == "check"


@pytest.mark.parametrize(
    "command",
    [*WRITING, *(["page", "results.json", option] for option in ("--html", "--markdown"))],
    ids=[*IDS, "page --html", "page --markdown"],
)
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nowhere/file", "there is no folder"),
        ("folder", "is a folder"),
        ("file/file", "Not a directory"),
        ("loop", "symbolic links"),
        ("x" * 300, "name too long"),
        ("", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_written(command, place, reason, tmp_path, capsys, monkeypatch, nothing_may_run):
    monkeypatch.chdir(tmp_path)
    results.write(results.begin("bench"), tmp_path / "results.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert reason in refused([*command, place], capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("command", WRITING, ids=IDS)
def test_a_read_only_place(command, tmp_path, capsys, nothing_may_run):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("")
    file.chmod(0o444)
    folder.mkdir(mode=0o555)
    assert "is read-only" in refused([*command, str(file)], capsys)
    assert "nothing can be written to" in refused([*command, str(folder / "file")], capsys)


def test_a_folder_that_refuses_even_root(capsys, nothing_may_run):
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc")
    assert "nothing can be written to" in refused([*CHECK, "--json", "/proc/self/file"], capsys)


def test_one_file_for_two_things(tmp_path, capsys, monkeypatch, nothing_may_run):
    monkeypatch.chdir(tmp_path)
    results.write(results.begin("bench"), tmp_path / "results.json")
    (tmp_path / "link").symlink_to("results.json")
    before = (tmp_path / "results.json").read_text()
    assert "are one file" in refused(["page", "results.json", "--html", "link"], capsys)
    assert "are one file" in refused(["page", "results.json", "--markdown", "link"], capsys)
    assert "are one file" in refused(["page", "results.json", "link", "--markdown", "page"], capsys)
    assert "are one file" in refused(["bench", "--device", "cpu", "--json", "a", "--html", "./a"], capsys)
    assert (tmp_path / "results.json").read_text() == before


def test_a_page_is_of_one_file_and_tables_of_several(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        results.write(results.begin("bench"), tmp_path / name)
    assert "--html and --svg draw one file" in refused(["page", "a.json", "b.json", "--html", "page"], capsys)
    assert not (tmp_path / "page").exists()
    assert cli.main(["page", "a.json", "b.json", "--markdown", "page"]) == 0
    assert (tmp_path / "page").read_text(encoding="utf-8").count("\n## ") == 2


TIMED = {"subject": "op", "case": "op 8x8", "provider": "triton", "direction": "both"}
TIMED |= {"microseconds": 2.0, "bandwidth": 3.0, "copy_microseconds": 1.0}
ROW = {"case": "op 8x8", "backend": "triton", "output": "y", "passed": True}
ROW |= {"max_error": 1.0, "relative_error": 0.1, "tolerance": 1.0}


def without(entry, field):
    return {name: value for name, value in entry.items() if name != field}


@pytest.mark.parametrize(
    "content",
    [
        *({"format": 2, "measurements": [without(TIMED, field)]} for field in ("case", "microseconds")),
        {"format": 2, "accuracy": [without(ROW, "passed")]},
        *({"format": 2, "steps": value} for value in (1, None, [1], [None], [{}])),
        *([], {}, {"format": 1}, {"format": "2"}, None),
    ],
)
def test_a_file_that_another_program_wrote(content, tmp_path, capsys, monkeypatch):
    """Each is one line before anything is drawn or compared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(json.dumps(content) if content is not None else "{")
    for command in (["compare", "file", "file"], ["page", "file", "--html", "new"]):
        assert "file: " in refused(command, capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", ["nowhere", ".", "file/file", "loop", "x" * 300])
def test_a_file_that_is_not_there(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert f"{place}: " in refused(["page", place, "--html", "page"], capsys)
    assert refused(["compare", place, place], capsys).startswith(f"mhc-ops compare: {place}: ")


def test_a_hostile_name_is_printed_as_it_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text(json.dumps({"format": 2, "measurements": [TIMED]}))
    (tmp_path / "b").write_text(json.dumps({"format": 2, "measurements": [TIMED, {**TIMED, "case": "\x1b[2J\n"}]}))
    assert cli.main(["compare", "a", "b"]) == 0
    assert "missing: \\x1b[2J\\n triton: only in the second file: both\n" in capsys.readouterr().out


def test_a_check_and_a_bench_have_nothing_in_common(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").write_text(json.dumps({"format": 2, "command": "bench", "measurements": [TIMED]}))
    (tmp_path / "check").write_text(json.dumps({"format": 2, "command": "check", "accuracy": [ROW]}))
    assert cli.main(["compare", "bench", "check"]) == 2
    assert capsys.readouterr().out.endswith("0 entries in both files, 0 regressions\n")
    assert cli.main(["page", "check", "--html", "page"]) == 0
    assert "1 of 1" in (tmp_path / "page").read_text()
