"""What a launcher such as torchrun tells each process of the learner, by the environment.

    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT ─▶ given_rank, given_world ─▶ learner.backend.group
                                                     └──▶ check_ranks: the door, before anything is started

No torch here: half of an environment, left over from another job, is told at once and not by a learner that
is started minutes later.
"""

from __future__ import annotations

import os

from common.errors import ConfigError

OTHERS = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""What WORLD_SIZE comes with."""


def given_rank() -> int:
    """The rank that a launcher, or rank 0, gave this process; 0 where nobody did.

    Raises:
        ConfigError: it is no number, or comes without the number of ranks: a rank of nobody's group would
            wait for a rank 0 that does not exist.
    """
    word = os.environ.get("RANK", "0")
    if not word.isdecimal():
        raise ConfigError(f"RANK in the environment must be a whole number, got {word!r}: unset it")
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"RANK={word} is in the environment without WORLD_SIZE: let a launcher set both, or unset "
            "RANK and use learner.backend.processes"
        )
    return int(word)


def given_local_rank() -> int:
    """Which of the ranks on its machine this process is; 0 where nobody said. Raises `ConfigError`."""
    word = os.environ.get("LOCAL_RANK", "0")
    if not word.isdecimal():
        raise ConfigError(f"LOCAL_RANK in the environment must be a whole number, got {word!r}: unset it")
    return int(word)


def given_world() -> int | None:
    """The number of ranks that a launcher, or rank 0, started; None where nobody did.

    Raises:
        ConfigError: the environment is half set, or its numbers contradict each other.
    """
    rank = given_rank()
    if "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in OTHERS if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is in the environment without {', '.join(missing)}: let a launcher set all of them, "
            "or unset it and use learner.backend.processes"
        )
    word = os.environ["WORLD_SIZE"]
    if not word.isdecimal() or rank >= int(word):
        raise ConfigError(
            f"RANK in the environment must be below WORLD_SIZE, got {os.environ['RANK']} and {word!r}: "
            "let a launcher set both, or unset both"
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"MASTER_PORT in the environment must be a port, 1 to 65535, got {port!r}: let a launcher "
            "set it, or unset WORLD_SIZE"
        )
    return int(word)


def check_ranks(processes: int, *, local: bool) -> None:
    """Refuse an environment that a learner would refuse, or wait in for ranks that nobody starts.

    Args:
        processes: `learner.backend.processes`; 1 leaves the number to a launcher.
        local: whether this process is to start all roles, its learner among them.

    Raises:
        ConfigError: as the others here do; or a launcher started another number of ranks than was asked for;
            or several ranks are announced to a process that starts the only learner: a launcher starts ranks
            of role=learner, and of nothing else.
    """
    world = given_world()
    given_local_rank()
    if world is not None and processes not in (1, world):
        raise ConfigError(
            f"learner.backend.processes must be 1 or what WORLD_SIZE in the environment says, {world}, got "
            f"{processes}: unset RANK and WORLD_SIZE, or leave the number of ranks to the launcher"
        )
    if local and world is not None and world > 1:
        raise ConfigError(
            "WORLD_SIZE in the environment must be 1 or unset with role=local, which starts one learner, got "
            f"{world}: unset RANK and WORLD_SIZE and use learner.backend.processes, or give the launcher "
            "role=learner"
        )
