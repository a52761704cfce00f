"""Downloads: the publisher's bytes, whole or not at all, on from where they broke off. No test needs the network."""

import hashlib
import json
import os
import threading

import pytest
from publishing import seen

from annotated.downloads import PartFile, fetch, fetch_known


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_fetch_brings_the_publishers_bytes(publisher, tmp_path, capsys):
    publisher.files["/a.gz"] = body = os.urandom(200_000)
    digest = hashlib.sha256(body).hexdigest()
    assert fetch(publisher.address + "/a.gz", tmp_path / "a.gz", digest) == digest
    assert (tmp_path / "a.gz").read_bytes() == body
    assert "a.gz: 100%" in capsys.readouterr().err  # the progress bar


def quick(address, path, sha256=None, attempts=3):
    return fetch(address, path, sha256, timeout=0.3, attempts=attempts, pause=0)


@pytest.mark.parametrize("fault", ["404", "wrong digest", "nobody there", "redirect without end"])
def test_a_failed_download_says_so_and_leaves_nothing(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = body = os.urandom(100_000)
    address, digest, error = publisher.address + "/a.gz", None, ConnectionError
    path = tmp_path / "a.gz"
    message = rf"could not fetch {address} .*put it at {path}"
    if fault == "404":
        del publisher.files["/a.gz"]
    elif fault == "wrong digest":
        digest, error = "0" * 64, ValueError
        message = f"{hashlib.sha256(body).hexdigest()}, expected {digest}: {path} was not written"
    elif fault == "redirect without end":
        publisher.redirects |= {"/a.gz": "/b.gz", "/b.gz": "/a.gz"}
    else:
        address = "http://127.0.0.1:9/a.gz"
        message = rf"could not fetch {address}"
    with pytest.raises(error, match=message):
        quick(address, path, digest)
    assert seen(tmp_path) == []
    if fault == "404":
        assert publisher.asked == ["/a.gz"]  # that answer is final
    assert len(publisher.asked) < 20


def test_a_redirect_is_followed(publisher, tmp_path):
    publisher.files["/new/a.gz"] = body = os.urandom(1000)
    publisher.redirects["/a.gz"] = publisher.address + "/new/a.gz"
    quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == body


def test_a_broken_download_goes_on_where_it_broke_off(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = os.urandom(80_000), '"one"'
    publisher.acts += ["cut", "busy", "stall", "cut", "cut", "cut", "cut"]  # more breaks than attempts: each brought more
    assert quick(publisher.address + "/a.gz", tmp_path / "a.gz") == sha256(publisher.files["/a.gz"])
    assert publisher.ranges_asked == [None, *(f"bytes={80_000 - 80_000 // 2**n}-" for n in (1, 1, 2, 3, 4, 5, 6))]
    assert (tmp_path / "a.gz").read_bytes() == publisher.files["/a.gz"] and seen(tmp_path) == ["a.gz"]


def test_the_next_call_goes_on_too_and_only_a_whole_file_gets_the_name(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = os.urandom(80_000), '"one"'
    publisher.acts += ["cut"]
    with pytest.raises(ConnectionError, match="40,000 of 80,000 bytes came"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz", attempts=1)
    assert seen(tmp_path) == ["a.gz.part", "a.gz.part.json"]
    quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert publisher.ranges_asked == [None, "bytes=40000-"]
    assert (tmp_path / "a.gz").read_bytes() == publisher.files["/a.gz"] and seen(tmp_path) == ["a.gz"]


@pytest.mark.parametrize("fault", ["stall", "busy", "cut"])
def test_a_server_that_never_recovers_ends_with_an_error(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = os.urandom(80_000)
    publisher.acts += [fault] * 9
    with pytest.raises(ConnectionError, match="could not fetch"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert not (tmp_path / "a.gz").exists() and len(publisher.asked) == 3 + (fault != "busy") - 1 + (fault == "busy")


@pytest.mark.parametrize("fault", ["changed", "changed, If-Range ignored", "no ranges", "no mark", "wrong range",
                                   "shorter now"])
def test_two_files_are_never_glued_together(publisher, tmp_path, fault):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = old, _ = os.urandom(80_000), '"one"'

    def change():
        publisher.files["/a.gz"], publisher.marks["/a.gz"] = os.urandom(30_000 if "short" in fault else 80_000), '"two"'
        return "any range" if "ignored" in fault or "short" in fault else ""

    publisher.acts += ["cut", change if "change" in fault or "short" in fault else fault.replace("ranges", "range")]
    if fault == "no mark":
        publisher.marks.clear()
        publisher.acts[1] = change
    quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == publisher.files["/a.gz"] and seen(tmp_path) == ["a.gz"]
    assert (publisher.files["/a.gz"] == old) == (fault in ("no ranges", "wrong range"))


def test_what_comes_damaged_is_not_taken_for_the_data(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = body = os.urandom(80_000), '"one"'
    publisher.acts += ["corrupt"]
    with pytest.raises(ValueError, match="was not written"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz", sha256(body[0]))
    assert seen(tmp_path) == []
    publisher.acts += ["corrupt and cut"]  # the damage is in the half that was there: everything anew
    quick(publisher.address + "/a.gz", tmp_path / "a.gz", sha256(body[0]))
    assert (tmp_path / "a.gz").read_bytes() == body[0] and publisher.ranges_asked[-2:] == ["bytes=40000-", None]


def test_pieces_with_another_digest_are_fetched_once_more_and_then_given_up(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = os.urandom(80_000), '"one"'
    publisher.acts += ["cut", "", "cut", ""]
    with pytest.raises(ValueError, match="was not written"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz", "0" * 64)
    assert publisher.ranges_asked == [None, "bytes=40000-"] * 2 and seen(tmp_path) == []


@pytest.mark.parametrize("left", ["no note", "another address", "other bytes", "no mark", "broken note", "shorter"])
def test_a_part_that_may_be_of_another_file_is_not_gone_on_from(publisher, tmp_path, left):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = body, _ = os.urandom(80_000), '"one"'
    address, part, note = publisher.address + "/a.gz", tmp_path / "a.gz.part", tmp_path / "a.gz.part.json"
    part.write_bytes(body[:999] if left == "shorter" else body[:500] + b"x" * 500)
    facts = {"address": address, "bytes": 1000, "sha256": sha256(part.read_bytes()), "mark": '"one"', "total": 80_000}
    facts |= {"another address": {"address": address + "x"}, "other bytes": {"sha256": sha256(b"x")},
              "no mark": {"mark": None}, "shorter": {"sha256": sha256(body[:1000])}}.get(left, {})
    if left != "no note":
        note.write_text(json.dumps(facts)[: 20 if left == "broken note" else None])
    quick(address, tmp_path / "a.gz")
    assert publisher.ranges_asked == [None]
    assert (tmp_path / "a.gz").read_bytes() == body and seen(tmp_path) == ["a.gz"]


def test_bytes_that_were_not_safe_yet_are_not_trusted(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = body, _ = os.urandom(80_000), '"one"'
    address = publisher.address + "/a.gz"
    with PartFile(tmp_path / "a.gz", address) as part:
        part.restart('"one"', 80_000)
        part.write(body[:30_000])
        part.keep()
        part.write(b"\0" * 999)  # as after a power cut
    quick(address, tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == body and publisher.ranges_asked == ["bytes=30000-"]


def test_a_file_of_unknown_length_needs_a_digest(publisher, tmp_path):
    publisher.files["/a.gz"] = body = os.urandom(1000)
    publisher.acts += ["no length"] * 3
    with pytest.raises(ConnectionError, match="does not say how long the file is"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert seen(tmp_path) == []
    publisher.acts[:] = ["no length"]
    quick(publisher.address + "/a.gz", tmp_path / "a.gz", sha256(body))
    assert (tmp_path / "a.gz").read_bytes() == body


def test_a_file_that_came_in_chunks_at_first_has_the_length_of_its_rest(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = os.urandom(80_000), '"one"'
    publisher.acts += ["chunked and cut", "cut"]
    quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert publisher.ranges_asked == [None, "bytes=40000-", "bytes=60000-"]
    assert (tmp_path / "a.gz").read_bytes() == publisher.files["/a.gz"] and seen(tmp_path) == ["a.gz"]


def test_a_full_disk_is_an_error_and_leaves_the_older_file(publisher, tmp_path, monkeypatch):
    publisher.files["/a.gz"] = os.urandom(80_000)
    (tmp_path / "a.gz").write_bytes(b"older")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConnectionError, match="No space left on device"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == b"older"


def test_what_a_full_disk_took_of_a_block_does_not_stay(publisher, tmp_path, monkeypatch):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = body, _ = os.urandom(200_000), '"one"'
    write, cut = PartFile.write, []

    def full(part, block):
        if part.size and not cut:
            cut.append(part.file.write(block[:100]))  # what still fitted
            raise OSError(28, "No space left on device")
        write(part, block)

    monkeypatch.setattr(PartFile, "write", full)
    quick(publisher.address + "/a.gz", tmp_path / "a.gz", hashlib.sha256(body).hexdigest())
    assert cut and (tmp_path / "a.gz").read_bytes() == body


def test_two_that_fetch_the_same_file_do_not_mix(publisher, tmp_path):
    publisher.files["/a.gz"], publisher.marks["/a.gz"] = body, _ = os.urandom(500_000), '"one"'
    publisher.acts += ["cut", "cut", "cut"]
    threads = [threading.Thread(target=quick, args=(publisher.address + "/a.gz", tmp_path / "a.gz")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a.gz").read_bytes() == body and seen(tmp_path) == ["a.gz"]


def test_a_failed_download_leaves_the_older_file(publisher, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"older")
    publisher.files["/a.gz"] = os.urandom(1000)
    with pytest.raises(ValueError):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz", "0" * 64)
    assert (tmp_path / "a.gz").read_bytes() == b"older"


def test_a_digest_that_nobody_published_is_recorded_once_and_held_to(publisher, tmp_path):
    publisher.files["/a.zip"] = first = os.urandom(1000)
    path = tmp_path / "a.zip"
    fetch_known(publisher.address + "/a.zip", path, {})
    record = json.loads((tmp_path / "downloads.json").read_text())["a.zip"]
    assert record == {"address": publisher.address + "/a.zip", "bytes": 1000,
                      "sha256": hashlib.sha256(first).hexdigest()}
    path.unlink()
    publisher.files["/a.zip"] = os.urandom(1000)
    with pytest.raises(ValueError, match=f"expected {record['sha256']}"):
        fetch_known(publisher.address + "/a.zip", path, {})
    assert not path.exists()


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "downloads.json").write_text("{")
    with pytest.raises(ValueError, match=r"downloads\.json is damaged .*delete it"):
        fetch_known("http://127.0.0.1:9/a", tmp_path / "a", {})
