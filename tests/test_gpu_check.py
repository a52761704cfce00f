"""`make gpu-check` on processors: every part finds what it should, and every kind of fault is found
in it.
"""

import json
import math
import re
import subprocess
import sys

import gpu_check
import pytest
from helpers import ROOT

RUN = {"losses": [10.2, 9.5, 7.0, 5.6, 5.0], "tokens per second": 250_000, "memory": 30e9}
WELL = {  # what a machine with two good GPUs finds
    "versions": {"PyTorch": "2.13.0", "built for CUDA": "13.0", "refused": None, "bfloat16": True,
                 "GPUs": ["NVIDIA H100"] * 2, "memory": [80e9] * 2},
    "steps": {kind: RUN for kind in ("fp32", "bf16")},
    "compiled": {kind: RUN for kind in ("fp32 compiled", "bf16 compiled")},
    "resume": {"exit statuses": [0, 0, -9, 0], "last checkpoints": ["step-00000050"] * 3,
               "apart, both undisturbed": 1e-6, "apart, killed and resumed": 4e-6},
    "processes": {"1": {**RUN, "backend": "none"}, "2": {**RUN, "backend": "nccl"}},
    "decode": {beam: {"as on the processor": 99, "as the reference": 96}
               for beam in ("beam 1", "beam 4")},
}


@pytest.mark.parametrize("part, place, change, message", [
    ("versions", None, {"refused": "device 'cuda' cannot be used"},
     "cannot be used; PyTorch 2.13.0 is built for CUDA 13"),
    ("versions", None, {"bfloat16": False}, "no bfloat16"),
    ("steps", "bf16", {"losses": [10.2, 9.5, math.nan]}, "bf16: the loss does not fall"),
    ("steps", "fp32", {"losses": [10.2, 10.2]}, "fp32: the loss does not fall"),
    ("compiled", "bf16 compiled", {"losses": [10.2, 5.3]},
     "bf16 compiled: the loss ends at 5.300, in fp32 at 5.000"),
    ("steps", "bf16", {"tokens per second": 25_000}, r"bf16: [0-3]\.\d% of the peak of NVIDIA"),
    ("steps", "fp32", {"memory": 79e9}, "fp32: 79 of 80 GB in use"),
    ("resume", None, {"apart, killed and resumed": 1e-2}, r"the weights lie 1\.0e-02 from those"),
    ("resume", None, {"apart, killed and resumed": math.nan}, "the weights lie nan"),
    ("resume", None, {"exit statuses": [0, 0, 0, 0]}, "did not go as planned"),
    ("processes", "2", {"losses": [math.nan] * 5}, "reaches the losses"),
    ("processes", "2", {"backend": "gloo"}, "speak through gloo, not nccl"),
    ("decode", "beam 4", {"as on the processor": 97}, "beam 4: of 100 sentences 97 are as on the"),
    ("decode", "beam 1", {"as the reference": 49}, "beam 1: .* 49 right")])
def test_every_part_can_fail_and_good_measurements_do_not(part, place, change, message):
    facts = json.loads(json.dumps(WELL[part]))
    assert list(gpu_check.faults(part, facts, "cuda", WELL)) == []
    (facts if place is None else facts[place]).update(change)
    (fault,) = gpu_check.faults(part, facts, "cuda", WELL)
    assert re.search(message, fault), fault


def test_the_share_of_the_peak_is_counted_operations_by_the_data_sheet():
    """By hand, for the base model: three times the products of a token, about 127 million."""
    d, d_ff, types, n = 512, 2048, 37_000, 28
    layer = 2 * (4 * d * d + 2 * d * d_ff) + 4 * n * d  # of the encoder
    token = 6 * (layer + layer + 2 * 4 * d * d + 4 * n * d) + 2 * d * types
    share = gpu_check.share_of_peak("NVIDIA H100 80GB HBM3", 100_000)
    assert share == pytest.approx(3 * token * 100_000 / 989e12, rel=0.02)
    assert gpu_check.share_of_peak("something else", 100_000) is None


@pytest.mark.long
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_parts_are_well_on_cpus_and_without_a_gpu_it_goes_no_further(tmp_path, monkeypatch,
                                                                         device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "tools/gpu_check.py", "--out", str(tmp_path), "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    if device == "cuda":
        assert done.returncode == 1 and list(parts) == ["versions"]
        assert "device 'cuda' cannot be used" in done.stdout
        return
    assert done.returncode == 0 and list(parts) == list(gpu_check.TIMES)
    assert "all parts are well" in done.stdout
    steps, resume, processes = (parts[part]["facts"] for part in ("steps", "resume", "processes"))
    assert steps["fp32"]["losses"] != steps["bf16"]["losses"]
    assert processes["2"]["backend"] == "gloo"
    assert resume["apart, killed and resumed"] == resume["apart, both undisturbed"] == 0
