"""Training and decoding on "cuda", traced without a GPU: no mixed devices, and how often the host
may wait for the device.

`cuda_trace.py` says how, in a process of its own that traces everything once; it takes a C++
compiler.
"""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

# What a step may cost. A reading of the losses, and whatever else is read now and then, may wait a
# little more often.
BUDGET = {"waits in a step": 0, "further waits at a reading": 1, "steps from one reading to "
          "the next": 16, "launches of the base model": 1000, "waits a token": 5}
LARGE, FOLLOWED = "base, prepared, bf16, 3,125 positions", "prepared, bf16, 25,000 positions"
PROBES = {  # what one line costs on a GPU, where x is (4, 3): [waits, launches]
    "x + 1": [0, 1], "x.t()[1:].view(2, 4)": [0, 0], "x.t().reshape(12)": [0, 1],
    "torch.empty_like(x)": [0, 0], "x[:2] = 0.0": [0, 1], "x.sum().item()": [1, 1],
    "bool((x > 0).all())": [1, 2], "x.tolist()": [1, 0], "x.nonzero()": [1, 1], "x[x > 0]": [1, 2],
    "x[x > 0] = 0.0": [0, 2], "x.cpu()": [1, 1], "x.to('cpu', non_blocking=True)": [0, 1],
    "torch.ones(3).to('cuda')": [1, 1], "torch.ones(3).to('cuda', non_blocking=True)": [1, 1],
    "torch.ones(3).pin_memory().to('cuda', non_blocking=True)": [0, 1],
    "x.copy_(torch.ones(3))": [1, 1], "torch.tensor([1.0, 2.0], device='cuda')": [1, 1],
    "torch.Event('cuda').synchronize()": [1, 0]}


@pytest.fixture(scope="module")
def traces():
    if torch.version.cuda:
        pytest.skip("this torch is built for CUDA; what stands in for a device is for one "
                    "that is not")
    done = subprocess.run([sys.executable, ROOT / "tests" / "cuda_trace.py", "--probe", *PROBES],
                          capture_output=True, encoding="utf-8")
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("code", PROBES)
def test_a_line_is_counted_as_a_gpu_would_have_it(traces, code):
    assert traces["probes"][code] == PROBES[code]


def dear_steps(waits, allowed):
    """The waits of those steps that wait more often than they may."""
    readings = math.ceil(len(waits) / BUDGET["steps from one reading to the next"])
    most_first = sorted(waits, reverse=True)
    return ([count for count in most_first[:readings]
             if count > allowed + BUDGET["further waits at a reading"]]
            + [count for count in most_first[readings:] if count > allowed])


def training(traces, kind):
    return {name: trace for name, trace in traces.items() if "validation" in trace
            and kind in name.split(", ")}


def test_nothing_waits_in_a_step_beyond_the_budget(traces):
    assert len(training(traces, "prepared")) == 4
    assert len(traces[FOLLOWED]["waits"]) > 2 * BUDGET["steps from one reading to the next"]
    for name, trace in training(traces, "prepared").items():
        assert not dear_steps(trace["waits"],
                              BUDGET["waits in a step"]), f"{name}: {trace['lines']}"


def test_the_plain_model_waits_for_its_positions_besides(traces):
    """It makes them on the processor, once for the encoder and once for the decoder, as page 05
    says.
    """
    assert len(training(traces, "plain")) == 2
    for name, trace in training(traces, "plain").items():
        positions = 4 if "accumulation of 2" in name else 2
        assert not dear_steps(trace["waits"],
                              BUDGET["waits in a step"] + positions), f"{name}: {trace['lines']}"
        assert sum(count for line, count in trace["lines"].items()
                   if "sinusoidal_encoding" in line) == positions * len(trace["waits"])


def test_a_step_of_the_base_model_launches_no_more_than_it_may(traces):
    trace = traces[LARGE]
    assert trace["launches"][-1] <= BUDGET["launches of the base model"], trace["operations"]
    assert trace["operations"]["_fused_adam_"] == 1
    assert sum(trace["operations"].values()) == trace["launches"][-1]
    fused = "_scaled_dot_product_efficient_attention"  # the fused function that takes masks
    assert trace["operations"][fused] == trace["operations"][f"{fused}_backward"] == 6 + 2 * 6
    # each is seen, forward and backward
    assert trace["operations"]["native_layer_norm"] == 6 * 2 + 6 * 3
    assert trace["operations"]["native_layer_norm_backward"] == 6 * 2 + 6 * 3


def test_rehearsal_and_validation_are_traced_beside_the_steps(traces):
    for trace in [*training(traces, "prepared").values(), *training(traces, "plain").values()]:
        assert trace["rehearsal"]["launches"] > trace["validation"]["launches"] / 3 > 0
        # steps are alike
        assert all(abs(count - trace["launches"][-1]) < 5 for count in trace["launches"][1:])


def test_greedy_decoding_waits_a_few_times_a_token(traces):
    for trace in (trace for name, trace in traces.items() if name.startswith("greedy")):
        assert len(trace["waits"]) == 4 and max(
            trace["waits"][1:]) <= BUDGET["waits a token"], trace["lines"]


@pytest.mark.parametrize("fault",
                         ["a causal mask made on the processor", "positions left on the processor"])
def test_what_is_left_on_the_processor_is_an_error(traces, fault):
    assert re.match("FakeTensorDeviceMismatchError: .*cpu.*cuda|FakeTensorDeviceMismatchError: "
                    ".*cuda.*cpu", traces[fault]["error"])


def test_a_bool_in_the_loss_is_one_more_wait_in_its_line(traces):
    plain, doubting = traces["plain, fp32, 3,125 positions"], traces["a bool() in the loss"]
    assert doubting["waits"][0] == plain["waits"][0] + 1
    (line,) = doubting["lines"].keys() - plain["lines"].keys()
    assert "of_hidden(" in line


def test_the_table_of_results_has_the_figures_of_the_file(traces):
    facts = json.loads((ROOT / "results" / "cuda_trace.json").read_text(encoding="utf-8"))
    row = next(line for line in (ROOT / "results" / "README.md").read_text(
        encoding="utf-8").splitlines() if "./cuda_trace.json" in line)
    for when in {"before", "after"} & facts.keys():
        stored = facts[when]["traces"]
        assert (f"{when}: the host waits {sum(stored[FOLLOWED]['waits'])} times in "
                f"{len(stored[FOLLOWED]['waits'])} steps" in row)
        assert f"launches {stored[LARGE]['launches'][-1]:,} operations" in row
        assert stored.keys() == traces.keys() - {"probes"}
