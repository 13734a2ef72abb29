"""Worlds at the place where a lease begins.

    Lease ─▶ snapshot ─restore─┐
         └─▶ history ──replay──┴─▶ state hash compared ─▶ a world that equals the one it was forked from

An environment that has once raised is thrown away, never used again. Healthy ones are kept and handed to
the next lease of the same task first: setting up another task's world can cost twenty times a restore.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.config import EnvConfig, to_plain
from common.errors import EnvironmentFault, TreewardError
from common.nouns import Lease, TaskId
from envs.base import Environment, Step
from envs.faulty import FaultyEnvironment
from envs.registry import make_env

HARNESS_KEYS = ("name", "faults")
"""Keys of the `env` section that are no options of the environment itself."""


def env_factory(config: EnvConfig) -> Callable[[], Environment]:
    """A function that builds the configured environment.

    Raises:
        ConfigError: (when called) an unknown environment or option, or a value it refuses.
    """
    options = {key: value for key, value in to_plain(config).items() if key not in HARNESS_KEYS}
    return lambda: make_env(config.name, options)


class Worlds:
    """Environments that are not in use, by the task they last held.

    Args:
        make: builds one more.
        faults: share of steps that raise, for tests of what is done about it.
        keep: most idle environments.
    """

    def __init__(self, make: Callable[[], Environment], faults: float = 0.0, keep: int = 64) -> None:
        self._make, self._faults, self._keep = make, faults, keep
        self._idle: OrderedDict[int, tuple[TaskId, Environment]] = OrderedDict()
        self._by_task: dict[TaskId, list[int]] = {}
        self._serial = 0

    @contextmanager
    def borrow(self, task: TaskId, salt: str = "") -> Iterator[Environment]:
        """A world for one episode; it comes back unless the block raises.

        Args:
            salt: who borrows it; the planted faults of `env.faults` depend on it.
        """
        world = self._take(task)
        try:
            yield FaultyEnvironment(world, self._faults, salt) if self._faults else world
        except BaseException:
            # Whatever state an exception or a cancellation left behind is not passed on.
            world.close()
            raise
        self._give_back(task, world)

    def close(self) -> None:
        """Close every idle world."""
        for _, world in self._idle.values():
            world.close()
        self._idle.clear()
        self._by_task.clear()

    def _take(self, task: TaskId) -> Environment:
        if not self._idle:
            return self._make()
        same = self._by_task.get(task)
        serial = same[-1] if same else next(iter(self._idle))
        return self._remove(serial)

    def _give_back(self, task: TaskId, world: Environment) -> None:
        self._serial += 1
        self._idle[self._serial] = (task, world)
        self._by_task.setdefault(task, []).append(self._serial)
        if len(self._idle) > self._keep:
            self._remove(next(iter(self._idle))).close()

    def _remove(self, serial: int) -> Environment:
        task, world = self._idle.pop(serial)
        same = self._by_task[task]
        same.remove(serial)
        if not same:
            del self._by_task[task]
        return world


def restore_anchor(world: Environment, lease: Lease) -> Step | None:
    """Bring `world` to where `lease` samples next.

    Returns:
        The last step of a replayed history, None if there was a snapshot or no step: a retry may find that
        the last turn that was accepted had already ended the episode.

    Raises:
        EnvironmentFault: the world raised, ended early, or shows another state than the anchor had.
    """
    last: Step | None = None
    with as_fault(f"{lease.task} at {lease.id}"):
        if lease.snapshot is not None:
            world.restore(lease.snapshot)
        else:
            last = _replay(world, lease)
        found = world.state_hash()
    if lease.state_hash and found != lease.state_hash:
        raise EnvironmentFault(
            f"{lease.task} did not restore for {lease.id}: state {found[:12]}, expected "
            f"{lease.state_hash[:12]}; the environment's version or options differ between actors"
        )
    return last


def _replay(world: Environment, lease: Lease) -> Step | None:
    world.reset(lease.task)
    last: Step | None = None
    for number, segment in enumerate(lease.history):
        if last is not None and last.is_over:
            raise EnvironmentFault(
                f"{lease.task} was over after {number} of {len(lease.history)} steps replayed for {lease.id}"
            )
        last = world.step(segment.action, segment.seed)
    return last


@contextmanager
def as_fault(what: str) -> Iterator[None]:
    """Turn whatever an environment raises into an `EnvironmentFault` that names `what`."""
    try:
        yield
    except TreewardError:
        raise
    except Exception as error:
        raise EnvironmentFault(f"{what}: the environment raised {type(error).__name__}: {error}") from error
