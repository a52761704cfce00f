"""Text, packed and in archives, and a publisher who serves it."""

import contextlib
import gzip
import http.server
import io
import lzma
import tarfile
import threading

import pytest

from annotated.files import zstd

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
PACK |= {".zst": zstd.compress} if zstd else {}


def lines(texts):
    return "".join(f"{text}\n" for text in texts).encode("utf-8")


def left_over(folder):
    return [path.name for path in folder.rglob("*") if ".part" in path.name]


def tar(members, mode="w:gz"):
    """An archive of {name: bytes, or a TarInfo with something special about it}."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as file:
        for name, body in members.items():
            entry = body if isinstance(body, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if entry is body else body
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def special(name, kind, link=""):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


class Publisher(http.server.BaseHTTPRequestHandler):
    """Serves the dictionary `files` of its server; `acts` says what goes wrong, one by one."""

    def do_GET(self):
        self.server.asked.append(self.path)
        act = self.server.acts.pop(0) if self.server.acts else ""
        body = self.server.files.get(self.path)
        if self.path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[self.path])
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(404 if body is None else 503 if act == "busy" else 200)
        sent = b"" if body is None or act == "busy" else body
        if act == "chunked and cut":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if act in ("cut", "stall"):
            sent = sent[: len(sent) // 2]
        if act == "chunked and cut":  # without the empty chunk at the end
            sent = b"%x\r\n%s\r\n" % (len(sent) // 2, sent[: len(sent) // 2])
        with contextlib.suppress(ConnectionError):
            self.wfile.write(sent)
        if act == "stall":
            self.server.released.wait(10)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def publisher(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Publisher) as server:
        server.files, server.asked, server.acts, server.redirects = {}, [], [], {}
        server.released = threading.Event()
        server.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.released.set()
        server.shutdown()


def seen(folder):
    """What lies in a folder, locks apart."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))
