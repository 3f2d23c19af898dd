"""measure/files.py: a file or a folder is written whole or not at all, and nothing else is touched."""

import os
import stat

import pytest

from mhc_ops.measure import files, report


def entries(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_a_file_keeps_its_mode_and_its_owner(mode, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(mode)
    owner = (1234, 2345) if os.geteuid() == 0 else (os.geteuid(), os.getegid())  # only root has files of others
    os.chown(file, *owner)
    link.symlink_to(file)
    files.write(link, "new")
    found = file.stat()
    assert (file.read_text(), stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid)) == ("new", mode, owner)
    assert entries(tmp_path) == ["file", "link"] and link.is_symlink() and not file.is_symlink()
    file.unlink()  # what a link names need not be there yet
    files.write(link, "newer")
    assert link.is_symlink() and file.read_text() == "newer"


def test_a_new_file_has_the_mode_that_umask_says(tmp_path):
    files.write(tmp_path / "file", "new")
    (tmp_path / "usual").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_of_two_writers_the_last_one_counts(tmp_path):
    """Also where it begins while the other is not done, and ends before it."""
    file = tmp_path / "file"
    with files.replaced(file) as slow:
        slow.write_text("slow, and half")
        files.write(file, "quick")
        assert slow.read_text() == "slow, and half" and file.read_text() == "quick"
    assert file.read_text() == "slow, and half" and entries(tmp_path) == ["file"]


@pytest.mark.parametrize("where", ["new", "below/new", "empty", "link to empty", "link to new"])
def test_a_folder_is_filled_whole_or_not_at_all(where, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link to empty").symlink_to("empty")
    (tmp_path / "link to new").symlink_to("fresh")
    before = entries(tmp_path)
    with pytest.raises(report.Refused, match=f"{where}: No space left"), files.filled(tmp_path / where) as part:
        (part / "a").write_text("a")
        raise OSError(28, "No space left on device")
    assert entries(tmp_path) == before
    with files.filled(tmp_path / where, last="a") as part:
        (part / "a").write_text("a")
        (part / "b").mkdir()
        assert entries(tmp_path / where) == sorted([part.name, f"{part.name}/a", f"{part.name}/b"])
    assert entries(tmp_path / where) == ["a", "b"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_folder_that_cannot_be_filled_to_the_end(nth, tmp_path, monkeypatch):
    rename, calls = os.rename, []

    def failing(source, target):
        calls.append(os.path.basename(target))
        if len(calls) == nth:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(report.Refused, match="Input/output error"), files.filled(tmp_path / "new", last="a") as part:
        for name in "ab":
            (part / name).mkdir()
            (part / name / "file").write_text("")
        (part / "c").write_text("")
    assert calls == ["b", "c", "a"][:nth]
    assert entries(tmp_path) == []


def test_what_a_folder_has_already_is_not_replaced(tmp_path):
    (tmp_path / "b").write_text("mine")
    with pytest.raises(report.Refused, match="b is there already"), files.filled(tmp_path) as part:
        (part / "a").write_text("")
        (part / "b").write_text("")
    assert entries(tmp_path) == ["b"] and (tmp_path / "b").read_text() == "mine"
