"""What the commands write and read: links, devices, pipes, files that cannot be, and who says so when."""

import json
import os
import socket
import stat
import sys
import threading

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure import bench, results, selection
from mhc_ops.testing import accuracy, cases

SMALL = (cases.Case(cases.MHC_POST, (3,), 2, 8),)
CHECK = ["check", "--device", "cpu", "--backend", "reference"]
WRITING = (
    [*CHECK, "--json"],
    ["bench", "--device", "cpu", "--providers", "eager", "--json"],
    ["bench", "--device", "cpu", "--providers", "eager", "--html"],
    ["diagnose", "mhc_post", "--device", "cpu", "--shape", "3x2x8", "--json"],
    ["diagnose", "mhc_post", "--device", "cpu", "--shape", "3x2x8", "--html"],
)
IDS = [f"{command[0]} {command[-1]}" for command in WRITING]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(selection, "CHECK", SMALL)
    monkeypatch.setattr(selection, "BENCH_CPU", SMALL)
    monkeypatch.setattr(selection, "SCALING_CPU", ())


@pytest.fixture
def nothing_may_run(monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(accuracy, "measure", never)
    monkeypatch.setattr(bench, "run", never)
    monkeypatch.setattr(cli.diagnose, "diagnose", never)


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
def test_a_link_stays_a_link(command, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    assert cli.main([*command, str(link)]) == 0
    assert link.is_symlink()
    assert file.read_text() != "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_link_to_a_file_that_is_not_there_yet(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    assert cli.main([*CHECK, "--json", str(tmp_path / "link")]) == 0
    assert json.loads((tmp_path / "folder" / "file").read_text())["complete"]
    assert (tmp_path / "link").is_symlink()


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
        assert json.loads(read[0])["command" if command[0] != "diagnose" else "op"]
    else:
        assert read[0].rstrip().endswith("</html>")


def test_a_device_stays_a_device(tmp_path):
    """As root, who could replace it; a copy of /dev/null, lest a test does."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        device.write_text("")
    except PermissionError:
        pytest.skip("only root makes devices")
    assert cli.main([*CHECK, "--json", str(device)]) == 0
    assert device.is_char_device()


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
        command = ["diagnose", "mhc_post", "--device", "cpu", "--shape", "3x2x8", "--json", f"/dev/fd/{writing}"]
        assert cli.main(command) == 0
        stdout.close()
        printed = reader.read()
    summary, rest = printed.split("\n", 1)
    assert summary.startswith("mhc_post, reference: nothing found")
    assert json.loads(rest)["op"] == "mhc_post"


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
        ("socket", "is a socket"),
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
    with socket.socket(socket.AF_UNIX) as open_socket:
        open_socket.bind("socket")
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


def test_a_disk_that_fills_up_does_not_end_a_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(selection, "CHECK", (*SMALL, cases.Case(cases.MHC_POST, (4,), 2, 8)))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cli.main([*CHECK, "--json", str(tmp_path / "file")]) == 2
    printed = capsys.readouterr()
    assert "10 passed, 0 failed" in printed.out
    assert printed.err.endswith(f"mhc-ops check: {tmp_path / 'file'}: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


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
GROWTH = {"subject": "op", "axis": "T", "at": "D = 8", "provider": "triton", "direction": "both", "overhead": 1.0}
GROWTH |= {"sizes": [8, 16], "cases": ["a", "b"], "megabytes": [1, 2], "microseconds": [1, 2]}
GROWTH |= {"copy_microseconds": [1, 2], "per_megabyte": 1.0, "copy_per_megabyte": 1.0, "noise": 0.1}
ROW = {"case": "op 8x8", "backend": "triton", "output": "y", "passed": True}
ROW |= {"max_error": 1.0, "relative_error": 0.1, "tolerance": 1.0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"measurements": 3', "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ({"measurements": 3}, "measurements must be a list, not 3"),
        ({"measurements": [3]}, "measurements.0 must be an object, not 3"),
        ({"measurements": [{**TIMED, "microseconds": "fast"}]}, 'measurements.0.microseconds must be a number, not "f'),
        ({"measurements": [{**TIMED, "microseconds": True}]}, "measurements.0.microseconds must be a number, not true"),
        ({"measurements": [{**TIMED, "samples": 1.5}]}, "measurements.0.samples must be a whole number, not 1.5"),
        ({"measurements": [TIMED, {**TIMED, "case": None}]}, "measurements.1.case must be a text, not null"),
        ({"measurements": [{"case": "op"}]}, "measurements.0.subject is missing"),
        ({"accuracy": [{**ROW, "passed": "yes"}]}, 'accuracy.0.passed must be true or false, not "yes"'),
        ({"accuracy": [], "versions": []}, "versions must be an object, not []"),
        ({"accuracy": [], "versions": {"torch": 2}}, "versions.torch must be a text, not 2"),
        ({"accuracy": [], "complete": None}, "complete must be true or false, not null"),
        ({"accuracy": [], "stack_megabytes": {"with": "few"}}, 'stack_megabytes.with must be a number, not "few"'),
        ({"accuracy": [], "format": "2"}, 'format must be a whole number, not "2"'),
        ({"measurements": [{**TIMED, "microseconds": 0}]}, "measurements.0.microseconds must be above 0, not 0"),
        ({"measurements": [{**TIMED, "copy_microseconds": None}]}, "measurements.0.copy_microseconds must be above 0"),
        ({"measurements": [{**TIMED, "bandwidth": 10**400}]}, "measurements.0.bandwidth must be a number, not 1000"),
        (
            {"measurements": [{**TIMED, "direction": "up"}]},
            "measurements.0.direction must be forward, backward or both",
        ),
        ({"measurements": [{**TIMED, "group": "x"}]}, "measurements.0.group must be training, decode or sweep"),
        ({"accuracy": [{**ROW, "dtype": "int2"}]}, "accuracy.0.dtype"),
        ({"measurements": [{**TIMED, "provider": " "}]}, 'measurements.0.provider must be a name, not " "'),
        (
            {"measurements": [], "scaling": [{**GROWTH, "sizes": [8]}]},
            "scaling.0.cases must be a list of 1, as sizes is",
        ),
        (
            {"measurements": [], "scaling": [{**GROWTH, "microseconds": [1]}]},
            "scaling.0.microseconds must be a list of 2, as",
        ),
        ({"accuracy": [], "versions": {"\x1b[2J\n": 2}}, r"versions.\x1b[2J must be a text, not 2"),
        ({"accuracy": [], "versions": {"a" * 5000: 2}}, f"versions.{'a' * 71}… must be a text, not 2"),
    ],
)
@pytest.mark.parametrize("command", [["compare", "FILE", "FILE"], ["page", "FILE", "--html", "page.html"]])
def test_a_file_that_is_broken(command, content, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text(content if isinstance(content, str) else json.dumps(content))
    assert f"FILE: {reason}" in refused(command, capsys)


@pytest.mark.parametrize("place", ["nowhere", ".", "file/file", "loop", "x" * 300])
def test_a_file_that_is_not_there(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert f"{place}: " in refused(["page", place, "--html", "page"], capsys)
    assert f"{place}: " in refused(
        ["diagnose", "mhc_post", "--device", "cpu", "--inputs", place, "--json", "a"], capsys
    )
    assert refused(["compare", place, place], capsys).startswith(f"mhc-ops compare: {place}: ")


def test_a_hostile_name_is_printed_as_it_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text(json.dumps({"measurements": [TIMED]}))
    (tmp_path / "b").write_text(json.dumps({"measurements": [TIMED, {**TIMED, "case": "\x1b[2J\n"}]}))
    assert cli.main(["compare", "a", "b"]) == 0
    assert "missing: \\x1b[2J\\n triton: only in the second file: both\n" in capsys.readouterr().out


def test_a_check_and_a_bench_have_nothing_in_common(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").write_text(json.dumps({"command": "bench", "measurements": [TIMED]}))
    (tmp_path / "check").write_text(json.dumps({"command": "check", "accuracy": [ROW]}))
    assert cli.main(["compare", "bench", "check"]) == 2
    assert capsys.readouterr().out.endswith("0 entries in both files, 0 regressions\n")
    assert cli.main(["page", "check", "--html", "page"]) == 0
    assert "all 1 pass" in (tmp_path / "page").read_text()


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"not a tensor", b"\x80\x02."], ids=["empty", "half", "text", "broken pickle"]
)
def test_inputs_that_are_no_file_of_tensors(content, tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    file.write_bytes(content)
    command = ["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]
    assert refused(command, capsys).startswith(f"mhc-ops diagnose: --inputs {file}: ")


def test_inputs_without_a_tensor(tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save({}, file)
    command = ["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]
    assert "x, h_out, h_post missing" in refused(command, capsys)


def test_inputs_with_a_hostile_name(tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save({"\x1b[2J\n": torch.zeros(1)}, file)
    command = ["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]
    assert r"; \x1b[2J unknown" in refused(command, capsys)
