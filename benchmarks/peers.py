"""Install the peers into an environment of their own that also sees the packages of this one:
`python -m benchmarks.peers FOLDER`.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path


def main(folder):
    """Make it anew; a peer that cannot be installed is named and left out."""
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    there = Path(folder, *here.parts[-3:])  # lib/python3.11/site-packages
    (there / "book.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    with open("pyproject.toml", "rb") as file:
        peers = tomllib.load(file)["project"]["optional-dependencies"]["bench"]
    # the one that is there, and no other
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    for peer in peers:
        print(f"[bench] installing {peer}", flush=True)
        command = [str(Path(folder) / "bin" / "python"), "-m", "pip", "install", "--quiet",
                   "--disable-pip-version-check", peer, torch]
        if subprocess.run(command).returncode:
            print(f"[bench] {peer} cannot be installed here; it is left out", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
