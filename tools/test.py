"""`make test`: the unit tests, then nbval over the stored outputs of the pages that do not train."""

import os
import subprocess
import sys

from annotated.training import book_model
from notebooks import ENVIRONMENT, ROOT, TRAINS, pages

workers = str(min(4, os.cpu_count() or 1))
environment = {**os.environ, **ENVIRONMENT}
pytest = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist=loadfile"]

book_model()  # trained here if it is not there, once, before several processes ask for it
stored = [path for path in pages() if path.name[:2] not in TRAINS]
sanitise = ROOT / "tests" / "nbval.cfg"
# The tests in a browser have a target of their own, `make test-site`; the long ones run in `make test-long`.
browser = ["--ignore-glob=tests/test_site*.py", "--ignore=tests/test_live.py"]
unit = subprocess.run([*pytest, *browser, "-m", "not long", "tests"], cwd=ROOT, env=environment)
print("The stored outputs of the pages, compared with a fresh run:", flush=True)
outputs = subprocess.run(
    [*pytest, "--nbval", "--nbval-current-env", f"--nbval-sanitize-with={sanitise}", *stored], cwd=ROOT, env=environment
)
sys.exit(unit.returncode or outputs.returncode)
