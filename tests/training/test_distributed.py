"""Ranks and devices; what several processes do together is in test_processes.py."""

import pytest
import torch

from annotated.training import distributed


@pytest.mark.parametrize("machines, key", [(1, "3/address"), (2, "address")])
def test_a_restarted_process_does_not_read_what_the_dead_have_written(monkeypatch, machines, key):
    store, groups = torch.distributed.HashStore(), []
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "GROUP_WORLD_SIZE": machines,
                        "TORCHELASTIC_RESTART_COUNT": 3}.items():
        monkeypatch.setenv(name, str(value))
    dist = distributed.dist
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *backend, **given: groups.append(given))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with distributed.process_group("cpu", 30):
        (given,) = groups
    given["store"].set("address", "here")
    assert store.check([key]) and given["timeout"].seconds == 30
    assert (given["rank"], given["world_size"]) == (1, 2)


@pytest.mark.parametrize("there, processes, best", [
    ("cuda", 1, "cuda"), ("cuda", 2, "cuda"), ("mps", 1, "mps"), ("mps", 2, "cpu"),
    (None, 1, "cpu")])
def test_the_best_device_is_chosen_and_named_once(monkeypatch, capsys, there, processes, best):
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available: torch.device(there) if there else None)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for rank in reversed(range(processes)):
        monkeypatch.setenv("RANK", str(rank))
        assert distributed.choose_device("auto") == best
        message = f"The device is {best}; choose another by --device.\n" if rank == 0 else ""
        assert capsys.readouterr() == ("", message)
    for name in ("cpu", "cuda:1", "mps", "abacus"):
        assert (distributed.choose_device(name), *capsys.readouterr()) == (name, "", "")
