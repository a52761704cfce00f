"""Training in several processes, and runs that are killed: the same batches, losses and, in the end, the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKER = '''
import copy, json
import torch
from torch.nn.parallel import DistributedDataParallel
from annotated import training
from annotated.batches import Batch
from annotated.regularization import LabelSmoothingLoss
from annotated.training import TrainingConfig, backward_share, process_group, ranks, sum_over_ranks, train
from annotated.transformer import Transformer, TransformerConfig

torch.set_num_threads(1)
with process_group("cpu"):
    rank, world = ranks()
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (40, 2), generator=draw).tolist()
    pairs = [tuple(torch.randint(4, 20, (n,), generator=draw).tolist() for n in pair) for pair in lengths]
    torch.manual_seed(rank)  # DDP takes the first weights of rank 0
    model = Transformer(TransformerConfig(20, N=1, d_model=16, d_ff=32, h=2, dropout=0.0)).double()
    report = {"world": world, "gradients": []}
    network = copy.deepcopy(model)
    network = DistributedDataParallel(network) if world > 1 else network
    criterion = LabelSmoothingLoss(0.1, reduction="sum")
    synchronised = []
    if world > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        network.register_comm_hook(None, lambda s, bucket: (synchronised.append(1), allreduce_hook(s, bucket))[1])
    for size, accumulate in ((12, 1), (12, 3), (1, 2)):  # of one sentence three of four shares are empty
        network.zero_grad()
        config = TrainingConfig(accumulate=accumulate)
        loss = backward_share(network, Batch.collate(pairs[:size]), criterion, config, rank, world)
        gradient = torch.cat([weight.grad.flatten() for weight in network.parameters()])
        report["gradients"].append([*sum_over_ranks(loss.item()), *gradient.tolist()])
    report["reductions"] = len(synchronised)
    seen, stream = [], training.index_stream
    training.index_stream = lambda *given: (seen.append(indices.tolist()) or indices for indices in stream(*given))
    config = TrainingConfig(steps=50, max_tokens=32, warmup=10, factor=0.3, validate_every=1)
    report["log"] = train(model, pairs, pairs[:7], config, show_progress=False)
    report["batches"] = seen
    if rank == 0:
        print(json.dumps(report))
'''


def execute(command):
    """Run Python in a process of its own; returns what its last line says as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The same work by one process and by two."""
    script = tmp_path_factory.mktemp("worker") / "worker.py"
    script.write_text(WORKER)
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    return execute([str(script)]), execute([*torchrun, str(script)])


def test_two_processes_give_the_gradient_of_one(reports):
    one, two = reports
    assert (one["world"], two["world"]) == (1, 2)
    for mine, theirs in zip(one["gradients"], two["gradients"], strict=True):
        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-9 and max(map(abs, mine[1:])) > 1e-3
    assert two["reductions"] == 3, "one for each batch, however many micro-batches it has"


def test_two_processes_see_the_same_batches_and_losses(reports):
    one, two = reports
    assert one["batches"][:50] == two["batches"][:50]
    assert len(one["log"]) == len(two["log"]) == 50
    for mine, theirs in zip(one["log"], two["log"], strict=True):
        for name in ("train_loss", "valid_loss"):
            assert abs(mine[name] - theirs[name]) < 1e-9, f"{name} at step {mine['step']}"
        assert (mine["rate"], mine["tokens"]) == (theirs["rate"], theirs["tokens"])
    assert one["log"][-1]["valid_loss"] < one["log"][0]["valid_loss"] - 0.1, "nothing was trained"


@pytest.mark.parametrize("processes", [1, 2])
def test_run_that_is_killed_three_times_ends_with_the_same_bits(processes):
    report = execute([str(ROOT / "tools" / "kill_loop.py"), "--kills", "3", "--processes", str(processes)])
    assert report["kills"] == 3 and report["equal to the last bit"]
