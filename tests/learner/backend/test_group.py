"""Finding other ranks, and the sentences where that goes wrong; several real ranks are in test_ranks.py."""

import pytest
import torch

from common.config_backend import BackendConfig
from common.errors import ConfigError
from learner.backend.group import RankLost, given_rank, open_group, speaks_of_peers


def test_one_rank_needs_nobody_and_leaves_torch_s_process_group_alone(tmp_path):
    with open_group(BackendConfig(device="cpu"), tmp_path) as group:
        assert (group.rank, group.world) == (0, 1)
        assert group.gather(b"mine") == [b"mine"]
        values = torch.tensor([1.0, 2.0])
        assert group.sum(values).tolist() == [1.0, 2.0]
        assert not torch.distributed.is_initialized()


def test_a_process_group_is_made_when_asked_for_and_goes_with_the_group(tmp_path):
    with open_group(BackendConfig(device="cpu"), tmp_path) as group:
        group.join()
        group.join()
        assert torch.distributed.get_world_size() == 1
    assert not torch.distributed.is_initialized()


def test_an_environment_that_is_half_set_is_refused_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="without RANK, MASTER_ADDR, MASTER_PORT"):
        open_group(BackendConfig(device="cpu"), tmp_path)


def test_a_rank_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="RANK in the environment must be a whole number, got 'one'"):
        given_rank()


def test_a_rank_whose_others_do_not_come_gives_up_within_the_timeout(tmp_path, monkeypatch):
    environment = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankLost, match="found no others"):
        open_group(BackendConfig(device="cpu", collective_timeout_s=1.0), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        open_group(BackendConfig(device="cuda"), tmp_path)


def test_a_mistake_of_our_own_is_not_taken_for_a_lost_rank():
    assert speaks_of_peers(RuntimeError("[gloo/transport/tcp/pair.cc:546] Connection closed by peer"))
    assert not speaks_of_peers(RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"))
