"""What a launcher leaves in the environment, and the sentences where it does so by halves."""

import pytest

from common.errors import ConfigError
from common.ranks import check_ranks, given_local_rank, given_rank, given_world

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)


def left(monkeypatch: pytest.MonkeyPatch, **words: str) -> None:
    for name, word in words.items():
        monkeypatch.setenv(name, word)


def test_nobody_gives_no_rank_and_no_number_of_them() -> None:
    assert (given_rank(), given_local_rank(), given_world()) == (0, 0, None)
    check_ranks(1, local=True)


def test_a_launchers_word_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, **WHOLE)
    assert (given_rank(), given_local_rank(), given_world()) == (1, 1, 4)
    check_ranks(1, local=False)


def test_a_process_that_starts_every_role_is_no_rank_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    left(monkeypatch, **WHOLE)
    with pytest.raises(ConfigError, match=r"must be 1 or unset with role=local, .* got 4: unset RANK and"):
        check_ranks(1, local=True)
    left(monkeypatch, RANK="0", WORLD_SIZE="1")
    check_ranks(1, local=True)


@pytest.mark.parametrize("rank", ["one", "-1", "", "²"])
def test_a_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    left(monkeypatch, RANK=rank)
    with pytest.raises(ConfigError, match=f"^RANK in the environment must be a whole number, got '{rank}'"):
        given_rank()


def test_each_part_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        left(monkeypatch, **WHOLE)
        monkeypatch.delenv(name)
        with pytest.raises(ConfigError, match=rf"^WORLD_SIZE is in the environment without {name}: let"):
            check_ranks(1, local=False)


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1", ""])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    left(monkeypatch, **{**WHOLE, "MASTER_PORT": port})
    with pytest.raises(ConfigError, match=f"^MASTER_PORT in the environment must be a port, .* got '{port}'"):
        given_world()


def test_a_launcher_and_the_configuration_must_not_say_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left(monkeypatch, **WHOLE)
    for agreed in (1, 4):
        check_ranks(agreed, local=False)
    with pytest.raises(
        ConfigError, match=r"^learner\.backend\.processes must be 1 or what .*, 4, got 2: unset"
    ):
        check_ranks(2, local=False)
