"""Files: text is read as written, nothing appears half, what is old is cleared."""

import io
import os
import random
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from publishing import PACK, left_over, special, tar

from annotated import files
from annotated.files import input_lines, stream_lines, whole_file, whole_folder, write_text

DRAW = random.Random(0)

# reading text


@pytest.mark.parametrize("packing", PACK)
def test_text_is_read_as_written(tmp_path, packing):
    path = tmp_path / f"text.en{packing}"
    lines = ["one\u2028still one", "\u0085two\x0b\x0c\x1c", "  three ", "", "five"]
    path.write_bytes(PACK[packing]("\n".join(lines).encode()))
    assert list(stream_lines(path)) == lines
    path.write_bytes(PACK[packing](b""))
    with pytest.raises(ValueError, match=r"text\.en.* is empty"):
        list(stream_lines(path))


@pytest.mark.parametrize("read", [stream_lines, input_lines])
def test_invalid_utf8_names_file_and_line(tmp_path, read):
    path = tmp_path / "latin.de"
    path.write_bytes("gut\nauch gut\nschön".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.de, line 3: not UTF-8"):
        list(read(path))


@pytest.mark.parametrize("packing", [*PACK][1:])
@pytest.mark.parametrize("damage", ["cut", "not packed", "flipped"])
def test_a_damaged_packed_file_is_named(tmp_path, packing, damage):
    if (packing, damage) == (".zst", "flipped"):
        pytest.skip("the format has no checksum unless its writer adds one")
    path, good = tmp_path / f"a.en{packing}", PACK[packing](b"%x\n" % DRAW.getrandbits(4000))
    flipped = bytes(byte ^ 0xFF * (n == len(good) // 2) for n, byte in enumerate(good))
    path.write_bytes({"cut": good[:-10], "not packed": b"plain text\n", "flipped": flipped}[damage])
    with pytest.raises(ValueError, match=rf"a\.en\{packing} is damaged .*delete it"):
        list(stream_lines(path))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(files.UNPACK, ".zst", None)
    with pytest.raises(ImportError, match=r"a\.en\.zst: \.zst needs Python 3\.14 or the package"):
        list(stream_lines(tmp_path / "a.en.zst"))
    assert files.plain_name("x/train.en.zst") == files.plain_name("train.en") == "train.en"


# members of archives


@pytest.mark.parametrize("kind, to", [(tarfile.SYMTYPE, "/etc/passwd"), (tarfile.DIRTYPE, ""),
                                      (tarfile.LNKTYPE, "b.en"), (tarfile.FIFOTYPE, "")])
def test_a_member_that_is_no_file_is_refused(tmp_path, kind, to):
    member = special("a.en", kind, to)
    (tmp_path / "a.tgz").write_bytes(tar({"./b.en": b"text\n", "a.en": member}))
    assert list(stream_lines(tmp_path / "a.tgz", "b.en")) == ["text"]
    with pytest.raises(ValueError, match=r"a\.tgz holds no file a\.en"):
        list(stream_lines(tmp_path / "a.tgz", "a.en"))


@pytest.mark.parametrize("damage", ["cut", "no archive", "cut tar"])
def test_a_damaged_archive_is_named(tmp_path, damage):
    text = DRAW.randbytes(50_000).hex().encode() + b"\n"
    good = tar({"a.en": text}, "w" if damage == "cut tar" else "w:gz")
    bad = b"nothing of the kind" if damage == "no archive" else good[: len(good) // 2]
    (tmp_path / "a.tgz").write_bytes(bad)
    with pytest.raises(ValueError, match=r"a\.tgz is damaged"):
        list(stream_lines(tmp_path / "a.tgz", "a.en"))


# the root


def test_the_root_is_argument_then_variable_then_checkout_then_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ANNOTATED_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert files.data_root(tmp_path / "argument") == tmp_path / "argument"
    assert files.data_root() == tmp_path / "variable"
    monkeypatch.delenv("ANNOTATED_DATA")
    monkeypatch.setattr(files, "checkout_data", lambda: tmp_path / "checkout")
    assert files.data_root() == tmp_path / "checkout"
    monkeypatch.setattr(files, "checkout_data", lambda: None)
    assert files.data_root() == tmp_path / "cache" / "annotated"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.data_root() == tmp_path / "home" / ".cache" / "annotated"


# the disk


def test_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    done, real = [], {name: getattr(os, name) for name in ("fsync", "replace")}
    for name in real:
        monkeypatch.setattr(os, name, lambda *a, name=name: (done.append(name), real[name](*a)))
    with whole_file(tmp_path / "file") as file:
        file.write(b"text")
    assert done == ["fsync", "replace"]


# folders that appear whole


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with whole_folder(tmp_path / "new" / "deep" / "folder") as part:
        (part / "file").write_bytes(b"text")
        assert not (tmp_path / "new" / "deep" / "folder").exists()
    assert (tmp_path / "new" / "deep" / "folder" / "file").read_bytes() == b"text"
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "other") as part:
        (part / "file").write_bytes(b"half")
        raise RuntimeError
    exists = pytest.raises(FileExistsError, match="folder exists already")
    with exists, whole_folder(tmp_path / "new" / "deep" / "folder"):
        pass
    for theirs in ("late/theirs", "empty"):
        name, faster = theirs.split("/")[0], "another process was faster"
        with pytest.raises(FileExistsError, match=faster), whole_folder(tmp_path / name) as part:
            (part / "ours").write_bytes(b"")
            (tmp_path / theirs).mkdir(parents=True)
        assert (tmp_path / theirs).is_dir() and not (tmp_path / name / "ours").exists()
    assert left_over(tmp_path) == []


def test_json_is_readable_and_whole(tmp_path):
    path = tmp_path / "new" / "deep" / "a.json"
    files.write_json(path, {"ü": [1, None]})
    assert path.read_text(encoding="utf-8") == '{\n "ü": [\n  1,\n  null\n ]\n}\n'
    with pytest.raises(TypeError):
        files.write_json(path, {1, 2})
    assert '"ü"' in path.read_text(encoding="utf-8") and left_over(path.parent) == []


@pytest.mark.parametrize("data, lines", [
    (b"", []), (b"\n", [""]), (b"one", ["one"]), (b"one\n\n", ["one", ""]),
    (b"\xef\xbb\xbfone\n", ["one"]), (b"one\r\ntwo\r\n", ["one", "two"]), (b"one\r\r\n", ["one\r"]),
    (b"a\rb\n", ["a\rb"]), ("a\u2028b\u0085c\x0bdä\n".encode(), ["a\u2028b\u0085c\x0bdä"])])
def test_lines_end_at_newlines_only(tmp_path, monkeypatch, data, lines):
    (tmp_path / "in.txt").write_bytes(data)
    assert list(input_lines(tmp_path / "in.txt")) == lines
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert list(input_lines("-")) == lines


# --- what is no plain file


def node(path, kind):
    """A pipe, or a copy of a device; never the system's own."""
    if kind == "pipe":
        os.mkfifo(path)
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, {"null": 3, "full": 7}[kind]))
        return os.open(path, os.O_RDONLY)
    except PermissionError:
        pytest.skip("only root makes devices, and not in every container")


@pytest.mark.parametrize("kind", ["pipe", "null", "full"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_device_or_a_pipe_is_written_to_and_stays_what_it_is(tmp_path, kind, linked):
    def what(path=tmp_path / "node"):
        return [getattr(os.lstat(path), f"st_{field}") for field in ("ino", "mode", "rdev")]

    path = tmp_path / "link" if linked else tmp_path / "node"
    reader = node(tmp_path / "node", kind)
    before = what()
    if linked:
        path.symlink_to("node")
    if kind == "full":
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "text")
    else:
        write_text(path, "text")
        assert os.read(reader, 9) == (b"text" if kind == "pipe" else b"")
    os.close(reader)
    assert what() == before and left_over(tmp_path) == []


def test_a_plain_file_is_replaced_through_links_and_keeps_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "file", tmp_path / "link"
    link.symlink_to("second")
    (tmp_path / "second").symlink_to("far/file")
    write_text(link, "new")  # the links lead to nothing yet
    assert target.read_text() == "new"
    target.chmod(0o640)
    write_text(link, "newer")
    assert target.read_text() == "newer" and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert link.is_symlink() and left_over(tmp_path) == left_over(tmp_path / "far") == []


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_files_in_shared_memory_are_replaced():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for text in ("the first text", "another"):
            write_text(Path(folder, "file"), text)
        assert Path(folder, "file").read_text() == "another"


def test_what_standard_output_held_before_stays(tmp_path):
    code = "from annotated.files import write_text; write_text('/dev/stdout', 'new')"
    (tmp_path / "log").write_text("old ")
    with open(tmp_path / "log", "a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "old new"


def test_a_name_that_cannot_be_written_is_refused_before_work_begins(tmp_path):
    (tmp_path / "file").write_text("")
    for path, kind, words in ((tmp_path, IsADirectoryError, "is a folder: give the name"),
                              (tmp_path / "file" / "x", OSError, "(?i)not a directory|exists")):
        with pytest.raises(kind, match=words):
            files.check_output(path)
        with pytest.raises(kind, match=words):
            write_text(path, "text")
    files.check_output(tmp_path / "new" / "folder" / "file")
    assert (tmp_path / "new" / "folder").is_dir() and list(tmp_path.rglob("*.part-*")) == []


def test_what_is_wrong_with_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(ValueError, match="standard input, line 1: not UTF-8"):
        list(input_lines("-"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed: name a file"):
        list(input_lines("-"))
