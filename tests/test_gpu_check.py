"""`make gpu-check` and `tools/gpu_first_run.sh` on processors: every part finds what it should, and
every kind of fault is found in it.
"""

import json
import math
import os
import re
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import gpu_check
import pytest
from helpers import ROOT

RUN = {"losses": [10.2, 9.5, 7.0, 5.6, 5.0], "tokens per second": 250_000, "memory": 30e9,
       "share of peak": 0.1, "waits": [0, 1]}
WELL = {  # what a machine with two good GPUs finds
    "versions": {"PyTorch": "2.13.0", "built for CUDA": "13.0", "refused": None, "bfloat16": True,
                 "GPUs": ["NVIDIA H100"] * 2, "memory": [80e9] * 2},
    "steps": {kind: RUN for kind in ("fp32", "bf16")},
    "compiled": {kind: RUN for kind in ("fp32 compiled", "bf16 compiled")},
    "resume": {"exit statuses": [0, 0, -9, 0], "last checkpoints": ["step-00000050"] * 3,
               "apart, both undisturbed": 1e-6, "apart, killed and resumed": 4e-6},
    "processes": {"1": {**RUN, "backend": "none"}, "2": {**RUN, "backend": "nccl"}}}


@pytest.mark.parametrize("part, place, change, message", [
    ("versions", None, {"refused": "device 'cuda' cannot be used"},
     "cannot be used; PyTorch 2.13.0 is built for CUDA 13"),
    ("versions", None, {"bfloat16": False}, "no bfloat16"),
    ("steps", "bf16", {"losses": [10.2, 9.5, math.nan]}, "bf16: the loss does not fall"),
    ("steps", "fp32", {"losses": [10.2, 10.2]}, "fp32: the loss does not fall"),
    ("compiled", "bf16 compiled", {"losses": [10.2, 5.3]},
     "bf16 compiled: the loss ends at 5.300, in fp32 at 5.000"),
    ("steps", "bf16", {"share of peak": 0.01}, r"bf16: 1\.0% of the GPU's peak"),
    ("compiled", "fp32 compiled", {"waits": [2, 9]}, "waits for the GPU 2 times in each step"),
    ("steps", "fp32", {"memory": 79e9}, "fp32: 79 of 80 GB in use"),
    ("resume", None, {"apart, killed and resumed": 1e-2}, r"the weights lie 1\.0e-02 from those"),
    ("resume", None, {"apart, killed and resumed": math.nan}, "the weights lie nan"),
    ("resume", None, {"exit statuses": [0, 0, 0, 0]}, "did not go as planned"),
    ("processes", "2", {"losses": [math.nan] * 5}, "reaches the losses"),
    ("processes", "2", {"backend": "gloo"}, "speak through gloo, not nccl")])
def test_every_part_can_fail_and_good_measurements_do_not(part, place, change, message):
    facts = json.loads(json.dumps(WELL[part]))
    assert list(gpu_check.faults(part, facts, "cuda", WELL)) == []
    (facts if place is None else facts[place]).update(change)
    (fault,) = gpu_check.faults(part, facts, "cuda", WELL)
    assert re.search(message, fault), fault


# -- the first run ---------------------------------------------------------------------------------

FIRST_RUN = ROOT / "tools" / "gpu_first_run.sh"
PLAN = re.findall(r"^part (\d+) (\w+) ", FIRST_RUN.read_text(encoding="utf-8"), re.MULTILINE)
PARTS = [name for _, name in PLAN]
# what the machine of a first run has, and no more
PACKAGES = "torch numpy transformers jaxtyping tokenizers safetensors sacrebleu tqdm filelock"


def first_run(out, path, **environment):
    """(exit status, {part: how it ended}) of a first run on processors."""
    kept = {name: os.environ[name] for name in ("HOME", "ANNOTATED_DATA") if name in os.environ}
    done = subprocess.run([FIRST_RUN, out, "--device", "cpu"], cwd=out.parent,
                          env=kept | {"PATH": f"{path}:/usr/bin:/bin", **environment})
    _, *rows = (out / "parts.tsv").read_text(encoding="utf-8").splitlines()
    return done.returncode, {name: how for name, _, how in (row.split("\t") for row in rows)}


def test_the_parts_of_the_first_run_take_at_most_nine_minutes():
    """With the five seconds that `timeout` leaves to one that does not end when it is asked to."""
    assert sum(int(seconds) for seconds, _ in PLAN) + 5 <= 9 * 60
    text = FIRST_RUN.read_text(encoding="utf-8")
    checks = re.findall(r"(\w+)=\$\(\((\d+) \* slow", text)
    assert [name for name, _ in checks] == list(gpu_check.TIME_LIMITS)
    assert sum(int(seconds) for _, seconds in checks) <= int(dict(map(reversed, PLAN))["check"])


@pytest.mark.parametrize("seconds, ends", [
    ("540", {name: "ok" for name in PARTS} | {"profile": "failed with status 3: no luck"}),
    ("3", dict.fromkeys(PARTS, "cut: no time was left") | {"check": "cut after 3 s"})])
def test_a_part_that_fails_or_is_cut_is_reported_and_takes_no_other_with_it(tmp_path, seconds,
                                                                            ends):
    """In place of Python a script, which does not end in the first part if that has 3 seconds."""
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text("""#!/bin/sh
case "$*" in *gpu_check.py*) [ $GPU_SECONDS = 540 ] || exec sleep 60 ;;
    *profile*) echo no luck; exit 3 ;; esac
""")
    stub.chmod(0o755)
    status, found = first_run(tmp_path / "out", stub.parent, GPU_SECONDS=seconds)
    found["check"] = found["check"].replace("after 2 s", "after 3 s")  # whole seconds are counted
    assert status == 1 and found == ends


def requirements(names):
    """The distributions of these names and all that they need, as far as they are here."""
    found, left = {}, list(names)
    while left:
        name = re.sub("[-_.]+", "-", left.pop()).lower()
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for other systems
            continue
        needed = [re.match(r"[\w.-]+", line)[0] for line in found[name].requires or ()
                  if "extra ==" not in line]
        left += [other for other in needed if re.sub("[-_.]+", "-", other).lower() not in found]
    return found.values()


def bare_environment(folder):
    """A virtual environment with PACKAGES; its folder of programs."""
    venv.create(folder, symlinks=True)
    (there,) = folder.glob("lib/python3*/site-packages")
    for distribution in requirements(PACKAGES.split()):
        for name in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (there / name).exists():
                (there / name).symlink_to(Path(distribution.locate_file(name)).resolve())
    return folder / "bin"


@pytest.mark.long
def test_the_first_run_is_rehearsed_without_what_a_bare_machine_lacks(tmp_path):
    """Every part ends well, however busy this machine is; without Multi30k its part says what is
    missing, and where.
    """
    programs = bare_environment(tmp_path / "bare")
    for missing in ("spacy", "pytest", "tyro", "requests", "matplotlib", "annotated"):
        asked = [programs / "python3", "-E", "-c", f"import {missing}"]
        done = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path)
        assert "ModuleNotFoundError" in done.stderr, missing
    out = tmp_path / "out"
    status, found = first_run(out, programs, GPU_SECONDS="3240")
    there = found["multi30k"] == "ok"
    if not there:
        assert "lacks train.en.gz: Multi30k is not there" in found.pop("multi30k")
    assert set(found.values()) == {"ok"} and status == (not there)
    check = json.loads((out / "check" / "report.json").read_text())["parts"]
    steps, resume = (check[part]["facts"] for part in ("steps", "resume"))
    assert steps["bf16"]["waits"] == [0, 0] and steps["fp32"]["losses"] != steps["bf16"]["losses"]
    assert resume["apart, killed and resumed"] == resume["apart, both undisturbed"] == 0
    for name, systems in {"base": {"annotated", "torch", "marian"},
                          "decoding": {"annotated", "marian"}}.items():
        cells = json.loads((out / f"{name}.json").read_text())["cells"]
        assert len(cells) == 2
        for cell in cells:
            assert {row["system"] for row in cell["entrants"] if row.get("seconds")} == systems
    assert json.loads((out / "profile.json").read_text())["last"]["annotated"]["seconds"] > 0
    if there:
        facts = json.loads((out / "multi30k" / "multi30k.json").read_text())
        assert facts["exit statuses"] == [-9, 0] and facts["trained to the end"]
