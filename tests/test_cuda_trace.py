"""Training and decoding on "cuda", traced without a GPU: no mixed devices, few waits of the host.

`experiments/cuda_trace.py` says how; a process of its own traces everything once, and needs a C++
compiler.
"""

import json
import math
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

# At most: launches of a step of the base model, waits of a token, steps from one reading of the
# losses to the next. Whatever is read now and then may make a step wait once more than usual.
LAUNCHES, TOKEN_WAITS, READING = 1000, 5, 16
LARGE, FOLLOWED = "base, prepared, bf16, 3,125 positions", "prepared, bf16, 25,000 positions"
PROBES = {  # what one line costs on a GPU, where x is (4, 3): [waits, launches]
    "x + 1": [0, 1], "x.t()[1:].view(2, 4)": [0, 0], "x.t().reshape(12)": [0, 1],
    "torch.empty_like(x)": [0, 0], "x[:2] = 0.0": [0, 1], "x.sum().item()": [1, 1],
    "bool((x > 0).all())": [1, 2], "x.tolist()": [1, 0], "x.nonzero()": [1, 1],
    "x.cpu()": [1, 1], "x.to('cpu', non_blocking=True)": [0, 1],
    "torch.ones(3).to('cuda', non_blocking=True)": [1, 1],
    "torch.ones(3).pin_memory().to('cuda', non_blocking=True)": [0, 1],
    "x.copy_(torch.ones(3))": [1, 1], "torch.Event('cuda').synchronize()": [1, 0]}


@pytest.fixture(scope="module")
def traces():
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA; the fake device is for one that is not")
    program = ROOT / "experiments" / "cuda_trace.py"
    done = subprocess.run([sys.executable, program, "--probe", *PROBES], capture_output=True,
                          encoding="utf-8")
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_line_is_counted_as_a_gpu_would_have_it(traces):
    assert traces["probes"] == PROBES


@pytest.mark.parametrize("kind, runs, positions", [("prepared", 4, 0), ("plain", 2, 2)])
def test_a_step_waits_for_nothing_but_the_plain_model_s_positions(traces, kind, runs, positions):
    """Those are made on the processor, once for the encoder and once for the decoder (page 05)."""
    training = {name: trace for name, trace in traces.items()
                if kind in name.split(", ") and not name.startswith("greedy")}
    assert len(training) == runs and len(traces[FOLLOWED]["waits"]) > 2 * READING
    for name, trace in training.items():
        usual = positions * (2 if "accumulation of 2" in name else 1)
        readings = math.ceil(len(trace["waits"]) / READING)
        most, rest = sorted(trace["waits"])[-readings:], sorted(trace["waits"])[:-readings]
        assert max(most) <= usual + 1 and max(rest, default=0) <= usual, f"{name}: {trace['lines']}"
        waits = sum(n for line, n in trace["lines"].items() if "sinusoidal_encoding" in line)
        assert not positions or waits == usual * len(trace["waits"])


def test_a_step_of_the_base_model_launches_no_more_than_it_may(traces):
    launches, operations = traces[LARGE]["launches"][-1], traces[LARGE]["operations"]
    assert launches <= LAUNCHES, operations
    assert operations["_fused_adam_"] == 1 and sum(operations.values()) == launches
    fused = "_scaled_dot_product_efficient_attention"  # the fused function that takes masks
    for name, layers in ((fused, 6 + 2 * 6), ("native_layer_norm", 6 * 2 + 6 * 3)):
        assert operations[name] == operations[f"{name}_backward"] == layers


def test_greedy_decoding_waits_a_few_times_a_token(traces):
    for trace in (traces["greedy, plain"], traces["greedy, prepared, bf16"]):
        first, *rest = trace["waits"]
        assert len(rest) == 3 and max(rest) <= TOKEN_WAITS, trace["lines"]
