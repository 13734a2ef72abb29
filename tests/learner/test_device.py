"""Where a rank computes, with and without a GPU."""

import pytest
import torch

from common.errors import ConfigError
from learner.device import check_device, choose_device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_refused_and_not_missed_by_auto() -> None:
    for ask in (check_device, choose_device):
        with pytest.raises(ConfigError, match=r"must be cpu or auto, got cuda: torch sees no GPU .*\(torch "):
            ask("cuda")
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")


def test_ranks_of_a_machine_share_its_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    check_device("cuda")
    assert chosen == [], "looking takes none"
    for local, place in (("0", 0), ("1", 1), ("3", 1)):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert choose_device("auto") == chosen[-1] == torch.device("cuda", place)
    assert choose_device("cpu") == torch.device("cpu") and len(chosen) == 3
