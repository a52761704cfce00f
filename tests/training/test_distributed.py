"""Ranks and devices; what several processes do together is in test_processes.py."""

import pytest
import torch
from small_runs import tiny

from annotated.training import distributed
from annotated.training.distributed import check_device, no_sync, parallelize, run_on_rank_zero, seed_rank


@pytest.mark.parametrize("machines, key", [(1, "3/address"), (2, "address")])
def test_a_restarted_process_does_not_read_what_the_dead_have_written(monkeypatch, machines, key):
    kept, groups = torch.distributed.HashStore(), []
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "GROUP_WORLD_SIZE": machines, "TORCHELASTIC_RESTART_COUNT": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed.dist, "rendezvous", lambda url, timeout: iter([(kept, 1, 2)]))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, **given: groups.append((backend, given)))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: None)
    with distributed.process_group("cpu", 30):
        (backend, given), = groups
    given["store"].set("address", "here")
    assert kept.check([key]) and (backend, given["rank"], given["world_size"], given["timeout"].seconds) == ("gloo", 1, 2, 30)


def test_device_that_is_there_is_accepted():
    assert check_device("cpu") == torch.device("cpu")
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=f"device '{missing}' cannot be used .*this machine has cpu"):
        check_device(missing)


@pytest.mark.parametrize("there, processes, best", [
    (["cuda", "mps"], 1, "cuda"), (["cuda"], 2, "cuda"), (["mps"], 1, "mps"), (["mps"], 2, "cpu"), ([], 1, "cpu")])
def test_the_best_device_there_is_is_chosen_and_told_once(monkeypatch, capsys, there, processes, best):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in there)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for rank in reversed(range(processes)):
        monkeypatch.setenv("RANK", str(rank))
        assert distributed.choose_device("auto") == best
        assert capsys.readouterr() == ("", f"The device is {best}; --device names another.\n" if rank == 0 else "")
    for name in ("cpu", "cuda:1", "mps", "abacus"):
        assert (distributed.choose_device(name), *capsys.readouterr()) == (name, "", ""), "what is named is not chosen"


def test_alone_the_network_is_the_models_own_method():
    model = tiny()
    assert parallelize(model) == model.hidden and run_on_rank_zero(lambda: 7) == 7
    with no_sync(model.hidden):
        pass


def test_every_rank_draws_its_own_random_numbers_and_rank_0_those_of_a_single_process(monkeypatch):
    drawn = []
    for rank, steps in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 3), (1, 3)):
        monkeypatch.setattr(distributed, "ranks", lambda rank=rank: (rank, 4))
        seed_rank(5, steps)
        drawn.append(torch.rand(8).tolist())
    torch.manual_seed(5)
    assert drawn[0] == torch.rand(8).tolist() and len(set(map(tuple, drawn))) == 6
