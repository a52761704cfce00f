"""Install the libraries that are compared into an environment of their own, which also sees the
packages of this one: `python -m benchmarks.install_peers FOLDER`.
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import metadata
from pathlib import Path


def main(folder):
    """Create the environment anew; exits with a message if a library cannot be installed."""
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    packages = Path(sysconfig.get_path("purelib"))
    installed = Path(folder, *packages.parts[-3:])  # lib/python3.11/site-packages
    (installed / "book.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    with open("pyproject.toml", "rb") as file:
        peers = tomllib.load(file)["project"]["optional-dependencies"]["bench"]
    # no peer may bring another version of torch
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    for peer in peers:
        print(f"[bench] installing {peer}", flush=True)
        command = [str(Path(folder) / "bin" / "python"), "-m", "pip", "install", "--quiet",
                   "--disable-pip-version-check", peer, torch]
        if subprocess.run(command).returncode:
            sys.exit(f"[bench] {peer} cannot be installed: without it a claim against the quickest "
                     "peer would be empty")


if __name__ == "__main__":
    main(sys.argv[1])
