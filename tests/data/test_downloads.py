"""Downloads: the publisher's bytes, whole or not at all, and held to a digest."""

import gzip
import hashlib
import io
import json
import lzma
import random
import threading
import zipfile

import pytest
from publishing import seen, tar

from annotated.data.downloads import fetch, fetch_known

DRAW = random.Random(0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """pooch pauses between attempts."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


@pytest.mark.parametrize("fault", ["404", "wrong digest", "nobody there", "redirect without end",
                                   "busy", "cut", "stall", "chunked and cut"])
def test_a_failed_download_says_so_and_leaves_nothing(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = DRAW.randbytes(100_000)
    address, path = publisher.address + "/a.gz", tmp_path / "a.gz"
    if fault == "nobody there":
        address = "http://127.0.0.1:9/a.gz"
    digest, error = None, ConnectionError
    message = rf"could not fetch {address} .*put it at {path}"
    if fault == "404":
        del publisher.files["/a.gz"]
    elif fault == "wrong digest":
        digest, error = "0" * 64, ValueError
        message = f"does not have the SHA-256 digest {digest}: {path} was not written"
    elif fault == "redirect without end":
        publisher.redirects |= {"/a.gz": "/b.gz", "/b.gz": "/a.gz"}
    publisher.acts += 4 * [fault]
    with pytest.raises(error, match=message):
        fetch(address, path, digest, timeout=0.3 if fault == "stall" else 60)
    assert seen(tmp_path) == []


@pytest.mark.parametrize("fault", ["busy", "cut", "stall", "chunked and cut"])
def test_what_breaks_is_tried_again_from_the_start(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = body = DRAW.randbytes(100_000)
    times = 1 if fault == "stall" else 2
    publisher.acts += times * [fault]
    fetch(publisher.address + "/a.gz", tmp_path / "a.gz", timeout=3 if fault == "stall" else 60)
    assert (tmp_path / "a.gz").read_bytes() == body and len(publisher.asked) == times + 1
    assert seen(tmp_path) == ["a.gz"]


def test_of_several_that_want_a_file_one_fetches_it(publisher, tmp_path):
    publisher.files["/a.bin"] = body = DRAW.randbytes(500_000)
    threads = [threading.Thread(target=fetch_known,
                                args=(publisher.address + "/a.bin", tmp_path / "a.bin", {}))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a.bin").read_bytes() == body and publisher.asked == ["/a.bin"]
    (tmp_path / ".lock").unlink()
    fetch_known("nowhere", tmp_path / "a.bin", {})  # a folder that may be read-only
    assert not (tmp_path / ".lock").exists()


def test_a_digest_that_nobody_published_is_recorded_once_and_held_to(publisher, tmp_path):
    publisher.files["/a.bin"] = first = DRAW.randbytes(1000)
    path = tmp_path / "a.bin"
    fetch_known(publisher.address + "/a.bin", path, {})
    record = json.loads((tmp_path / "downloads.json").read_text())["a.bin"]
    assert record == {"address": publisher.address + "/a.bin", "bytes": 1000,
                      "sha256": hashlib.sha256(first).hexdigest()}
    path.unlink()
    publisher.files["/a.bin"] = DRAW.randbytes(1000)
    message = (f"not have the SHA-256 digest {record['sha256']}.*new edition, "
               f"delete the entry a.bin in {tmp_path}/downloads.json")
    with pytest.raises(ValueError, match=message):
        fetch_known(publisher.address + "/a.bin", path, {})
    assert not path.exists()
    (tmp_path / "downloads.json").unlink()  # as advised
    fetch_known(publisher.address + "/a.bin", path, {})
    assert path.read_bytes() == publisher.files["/a.bin"] and (tmp_path / "downloads.json").exists()


LOGIN = b"<!DOCTYPE html><title>Log in</title>"


@pytest.mark.parametrize("name", ["a.zip", "a.gz", "a.xz", "a.tar", "a.tgz"])
@pytest.mark.parametrize("damage", ["login", "cut", "flipped"])
def test_a_bad_first_download_is_no_digest_to_hold_to(publisher, tmp_path, name, damage):
    text, packed = DRAW.randbytes(5000), io.BytesIO()
    if name == "a.zip":
        with zipfile.ZipFile(packed, "w") as file:
            file.writestr("member", text)
    elif name in ("a.tar", "a.tgz"):
        members = {"member": text, "other": text}
        packed.write(tar(members, "w" if name == "a.tar" else "w:gz"))
    else:
        packed.write({"a.gz": gzip.compress, "a.xz": lzma.compress}[name](text))
    good = packed.getvalue()
    # a plain tar has sums of its headers alone
    middle = 3 if (name, damage) == ("a.tar", "flipped") else len(good) // 2
    publisher.files[f"/{name}"] = {"login": LOGIN, "cut": good[:middle], "flipped": good[:middle]
                                   + bytes([good[middle] ^ 255]) + good[middle + 1:]}[damage]
    message = rf"{name}: what was downloaded is no complete \.\w+ file .* removed"
    with pytest.raises(ValueError, match=message):
        fetch_known(f"{publisher.address}/{name}", tmp_path / name, {})
    assert seen(tmp_path) == []
    publisher.files[f"/{name}"] = good
    fetch_known(f"{publisher.address}/{name}", tmp_path / name, {})
    assert (tmp_path / name).read_bytes() == good


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "downloads.json").write_text("{")
    with pytest.raises(ValueError, match=r"downloads\.json is no JSON"):
        fetch_known("http://127.0.0.1:9/a", tmp_path / "a", {})
