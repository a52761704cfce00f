"""`make gpu-check` on processors: every part finds what it should, and every kind of fault is found in it."""

import json
import math
import re
import subprocess
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, "tools")
import gpu_check  # noqa: E402

RUN = {"losses": [10.2, 9.5, 7.0, 5.6, 5.0], "tokens a second": 250_000, "memory": 30e9, "seconds to the first row": 2.0}
WELL = {  # what a machine with two good GPUs finds
    "versions": {"PyTorch": "2.13.0", "built for CUDA": "13.0", "nvidia-smi": "H100", "CUDA_VISIBLE_DEVICES": None, "refused": None,
                 "bfloat16": True, "GPUs": ["NVIDIA H100"] * 2, "memory": [80e9] * 2},
    "steps": {kind: RUN for kind in ("fp32", "bf16")},
    "compiled": {kind: RUN for kind in ("fp32 compiled", "bf16 compiled")},
    "resume": {"exit statuses": [0, -9, 0], "checkpoints when killed": ["step-00000010"], "last checkpoints": ["step-00000050"] * 3,
               "apart, both undisturbed": 1e-6, "apart, killed and resumed": 4e-6},
    "processes": {"1": {**RUN, "backend": "none"}, "2": {**RUN, "backend": "nccl"}},
    "decode": {f"beam {beam}": {"as on the processor": 99, "as the reference": 96, "words a second": 900} for beam in (1, 4)},
}


def faults(part, change=lambda found: None, device="cuda"):
    found = json.loads(json.dumps(WELL[part]))
    change(found)
    return gpu_check.judged(part, found, device, WELL)


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_good_measurements_have_no_faults(part):
    assert faults(part) == [] and list(gpu_check.lines_of(part, WELL[part], WELL["versions"]))


@pytest.mark.parametrize("part, change, said", [
    ("versions", lambda f: f.update({"refused": "device 'cuda' cannot be used", "GPUs": []}), "cannot be used; PyTorch 2.13.0 built for"),
    ("versions", lambda f: f.update({"bfloat16": False}), "no bfloat16"),
    ("steps", lambda f: f["bf16"].update({"losses": [10.2, 9.5, math.nan]}), "bf16: the loss does not fall"),
    ("steps", lambda f: f["fp32"].update({"losses": [10.2, 10.2]}), "fp32: the loss does not fall"),
    ("steps", lambda f: f["bf16"].update({"losses": [10.2, 5.3]}), "bf16: the loss ends at 5.300, in fp32 at 5.000"),
    ("compiled", lambda f: f["bf16 compiled"].update({"losses": [10.2, 5.3]}), "bf16 compiled: the loss ends at 5.300, in fp32 at 5.000"),
    ("compiled", lambda f: [facts.update({"losses": [10.2, 5.3]}) for facts in f.values()], "fp32 compiled: the loss ends at 5.300"),
    ("compiled", lambda f: f["bf16 compiled"].update({"tokens a second": 9_000}), "% of the peak"),
    ("steps", lambda f: f["bf16"].update({"tokens a second": 25_000}), r"bf16: [0-3]\.\d% of the peak of NVIDIA H100"),
    ("steps", lambda f: f["fp32"].update({"memory": 79e9}), "fp32: 79 of 80 GB in use"),
    ("resume", lambda f: f.update({"apart, killed and resumed": 1e-2}), r"the weights lie 1\.0e-02 from those of an undisturbed run"),
    ("resume", lambda f: f.update({"apart, both undisturbed": 0.0}), "two undisturbed runs 0.0e[+]00"),
    ("resume", lambda f: f.update({"apart, killed and resumed": math.nan}), "the weights lie nan"),
    ("resume", lambda f: f.update({"exit statuses": [0, 0, 0]}), "did not go as planned"),
    ("resume", lambda f: f.update({"checkpoints when killed": []}), "did not go as planned"),
    ("resume", lambda f: f.update({"last checkpoints": ["step-00000050", "step-00000050", "step-00000040"]}), "ended at"),
    ("processes", lambda f: f["2"].update({"losses": [10.2, 9.5, 7.0, 5.6, 5.2]}), "reaches the losses"),
    ("processes", lambda f: f["2"].update({"losses": [math.nan] * 5}), "reaches the losses"),
    ("processes", lambda f: f["2"].update({"backend": "gloo"}), "speak through gloo, not nccl"),
    ("decode", lambda f: f["beam 4"].update({"as on the processor": 97}), "beam 4: 3 of 100 sentences are others"),
    ("decode", lambda f: f["beam 1"].update({"as the reference": 49}), "beam 1: 49 of 100 sentences are right"),
])
def test_every_part_can_fail(part, change, said):
    found = faults(part, change)
    assert found and re.search(said, found[0]), found
    facts = {"found": WELL[part], "faults": found, "seconds": 3}
    text = gpu_check.page({"device": "cuda", "when": "now", "revision": "0" * 40, "parts": {part: facts}})
    assert f"{part}: FAILED" in text and f"FAULT {found[0]}" in text and text.endswith(f"FAILED: {part}\n")


def test_one_gpu_alone_is_no_fault():
    assert gpu_check.judged("processes", {}, "cuda", WELL) == []
    assert gpu_check.judged("compiled", {}, "cpu", {}) == []
    assert gpu_check.judged("compiled", WELL["compiled"], "cuda", {"steps": None}) == []
    assert list(gpu_check.lines_of("processes", {}, WELL["versions"])) == ["one GPU: nothing to compare"]


def test_the_share_of_the_peak_is_counted_operations_by_the_data_sheet():
    """By hand, for the base model: three times the matrices of a token, which are 2 × (3·4·d² + … ) operations, about 127 million."""
    d, d_ff, types, n = 512, 2048, 37_000, 28
    layer = 2 * (4 * d * d + 2 * d * d_ff) + 4 * n * d  # of the encoder
    token = 6 * (layer + layer + 2 * 4 * d * d + 4 * n * d) + 2 * d * types
    assert gpu_check.share_of_peak("NVIDIA H100 80GB HBM3", 100_000) == pytest.approx(3 * token * 100_000 / 989e12, rel=0.02)
    assert gpu_check.share_of_peak("something else", 100_000) is None


def check(tmp_path, *options):
    """(exit status, report, page of text) of a run of the tool."""
    done = subprocess.run([sys.executable, "tools/gpu_check.py", "--out", str(tmp_path), *options], cwd=ROOT, capture_output=True,
                          text=True, timeout=500)
    return done.returncode, json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.txt").read_text()


@pytest.mark.long
def test_without_a_gpu_it_says_what_it_saw_and_goes_no_further(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, report, text = check(tmp_path)
    assert status == 1 and list(report["parts"]) == ["versions"] and "FAILED: versions" in text
    (fault,) = report["parts"]["versions"]["faults"]
    assert "device 'cuda' cannot be used" in fault and "built for CUDA" in fault and "nvidia-smi" in fault


@pytest.mark.long
def test_a_part_that_dies_or_finds_no_end_is_a_fault_of_that_part(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, wrong = gpu_check.measured("steps", "cuda")
    assert found is None and wrong.startswith("exit status 1: ")
    monkeypatch.setitem(gpu_check.TIMES, "decode", 0.1)
    assert gpu_check.measured("decode", "cpu") == (None, "no end after 0.1 seconds")


@pytest.mark.long
def test_on_processors_all_parts_are_well(tmp_path):
    status, report, text = check(tmp_path, "--device", "cpu")
    assert status == 0, text
    parts = {part: facts["found"] for part, facts in report["parts"].items()}
    assert list(parts) == list(gpu_check.PARTS) and "all parts are well" in text and report["revision"] and report["modules"]
    assert set(parts["steps"]) == {"fp32", "bf16"} and parts["compiled"] == {}
    assert parts["steps"]["fp32"]["losses"] != parts["steps"]["bf16"]["losses"]
    assert parts["resume"]["apart, killed and resumed"] == parts["resume"]["apart, both undisturbed"] == 0, "to the bit on processors"
    assert parts["processes"]["2"]["backend"] == "gloo" and len(text.splitlines()) < 60
