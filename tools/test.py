"""`make test`: the unit tests, and the stored outputs of the pages, compared with what `make book` made of them here.

Pages whose present state was not executed yet are executed first, but for those that train for minutes.
"""

import os
import subprocess
import sys

from book import WORKERS, run_pages

from notebooks import ENVIRONMENT, ROOT, TRAINS, pages

if __name__ == "__main__":
    for name, reason in run_pages([path for path in pages() if path.name[:2] not in TRAINS]).items():
        print(f"{name}: {reason}", flush=True)  # and test_outputs.py fails
    # The tests in a browser have a target of their own, `make test-site`; the long ones run in `make test-long`.
    browser = ["--ignore-glob=tests/test_site*.py", "--ignore=tests/test_live.py"]
    workers = ["-n", str(WORKERS + 1), "--dist=loadfile"]  # one more than cores: tests that start processes wait for them
    command = [sys.executable, "-m", "pytest", "-q", *workers, "--durations=20", *browser, "-m", "not long", "tests"]
    sys.exit(subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode)
