"""Downloads: the publisher's bytes, whole or not at all, and held to a digest. No test needs the network."""

import hashlib
import json
import os
import threading

import pytest
from publishing import seen

from annotated.data.downloads import fetch, fetch_known


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """pooch pauses between attempts."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


def quick(address, path, sha256=None, attempts=3):
    return fetch(address, path, sha256, timeout=0.3, attempts=attempts)


@pytest.mark.parametrize("fault", ["404", "wrong digest", "nobody there", "redirect without end", "busy", "cut", "stall",
                                   "chunked and cut"])
def test_a_failed_download_says_so_and_leaves_nothing(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = os.urandom(100_000)
    address, digest, error, path = publisher.address + "/a.gz", None, ConnectionError, tmp_path / "a.gz"
    message = rf"could not fetch {address} .*put it at {path}"
    if fault == "404":
        del publisher.files["/a.gz"]
    elif fault == "wrong digest":
        digest, error, message = "0" * 64, ValueError, f"has not the SHA-256 digest {'0' * 64}: {path} was not written"
    elif fault == "redirect without end":
        publisher.redirects |= {"/a.gz": "/b.gz", "/b.gz": "/a.gz"}
    elif fault == "nobody there":
        address = "http://127.0.0.1:9/a.gz"
        message = rf"could not fetch {address}"
    else:
        publisher.acts += 3 * [fault]
    with pytest.raises(error, match=message):
        quick(address, path, digest)
    assert seen(tmp_path) == []


@pytest.mark.parametrize("fault", ["busy", "cut", "stall", "chunked and cut"])
def test_what_breaks_is_tried_again_from_the_start(publisher, tmp_path, fault):
    publisher.files["/a.gz"] = body = os.urandom(100_000)
    publisher.acts += [fault, fault]
    quick(publisher.address + "/a.gz", tmp_path / "a.gz")
    assert (tmp_path / "a.gz").read_bytes() == body and len(publisher.asked) == 3 and seen(tmp_path) == ["a.gz"]


def test_a_file_of_unknown_length_needs_a_digest(publisher, tmp_path):
    publisher.files["/a.gz"] = body = os.urandom(1000)
    publisher.acts += ["no length", "no length"]
    with pytest.raises(ConnectionError, match="does not say how long the file is"):
        quick(publisher.address + "/a.gz", tmp_path / "a.gz", attempts=1)
    assert seen(tmp_path) == []
    quick(publisher.address + "/a.gz", tmp_path / "a.gz", hashlib.sha256(body).hexdigest(), attempts=1)
    assert (tmp_path / "a.gz").read_bytes() == body


def test_of_several_that_want_a_file_one_fetches_it(publisher, tmp_path):
    publisher.files["/a.gz"] = body = os.urandom(500_000)
    threads = [threading.Thread(target=fetch_known, args=(publisher.address + "/a.gz", tmp_path / "a.gz", {})) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a.gz").read_bytes() == body and publisher.asked == ["/a.gz"]


def test_a_digest_that_nobody_published_is_recorded_once_and_held_to(publisher, tmp_path):
    publisher.files["/a.zip"] = first = os.urandom(1000)
    path = tmp_path / "a.zip"
    fetch_known(publisher.address + "/a.zip", path, {})
    record = json.loads((tmp_path / "downloads.json").read_text())["a.zip"]
    assert record == {"address": publisher.address + "/a.zip", "bytes": 1000,
                      "sha256": hashlib.sha256(first).hexdigest()}
    path.unlink()
    publisher.files["/a.zip"] = os.urandom(1000)
    with pytest.raises(ValueError, match=f"has not the SHA-256 digest {record['sha256']}"):
        fetch_known(publisher.address + "/a.zip", path, {})
    assert not path.exists()


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "downloads.json").write_text("{")
    with pytest.raises(ValueError, match=r"downloads\.json is damaged .*delete it"):
        fetch_known("http://127.0.0.1:9/a", tmp_path / "a", {})
