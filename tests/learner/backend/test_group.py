"""Finding other ranks, and the sentences where that goes wrong; several real ranks are in test_ranks.py."""

import threading

import pytest
import torch

from common.config_backend import BackendConfig
from common.errors import ConfigError, TreewardError
from common.ranks import given_rank
from learner.backend import worker
from learner.backend.group import RankLost, open_group, speaks_of_peers


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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_without_the_number_of_ranks_is_refused_wherever_it_is_looked_at(tmp_path, monkeypatch, rank):
    """It took itself for rank 0 of 1, and waited for orders that it would have had to give."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for ask in (given_rank, lambda: open_group(BackendConfig(device="cpu"), tmp_path)):
        with pytest.raises(
            ConfigError, match=rf"^RANK={rank} is in .* without WORLD_SIZE: .* unset RANK"
        ) as raised:
            ask()
        assert raised.value.exit_code == 2


@pytest.mark.parametrize("rank, world", [("1", "1"), ("2", "2"), ("0", "two")])
def test_a_rank_beyond_the_number_of_ranks_is_refused_at_once(tmp_path, monkeypatch, rank, world):
    environment = {"WORLD_SIZE": world, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"must be below WORLD_SIZE, got {rank} and '{world}'"):
        open_group(BackendConfig(device="cpu", collective_timeout_s=1.0), tmp_path)


def test_rank_0_never_follows_since_nobody_would_give_it_orders(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def build(group, folder):
        raise AssertionError("it began")

    monkeypatch.setattr(
        worker, "follow", lambda group, build: build(group, tmp_path)
    )  # it would never return
    result: list[TreewardError] = []

    def follow():  # beside the main thread, whose signals stay as they are
        try:
            worker.run_rank(BackendConfig(device="cpu"), tmp_path, build)
        except TreewardError as error:
            result.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(20)
    assert isinstance(result[0], ConfigError) and "must be 0 for rank 0 of 1" in str(result[0])
