"""A rig whose inputs and decisions are journalled as the loop does, so that they can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from allocator.budgets.base import Budget
from allocator.core import AllocatorCore, Handled, Send
from allocator.rules.base import Rule
from allocator.settings import Settings, code_of_decisions
from common.config import Config, TrackingConfig, agreed_settings
from common.config_allocator import AllocatorConfig, BudgetConfig, RandomRuleConfig, RuleConfig
from common.config_learner import LearnerConfig
from common.journal import JournalWriter, Record, read_journal
from common.messages import Hello, Message
from common.rundir import RunDir
from tests.allocator.harness import Rig


def configuration(
    rule: RuleConfig | None = None, continuations: int = 6, staleness: int = 0, steps: int = 2, batch: int = 2
) -> Config:
    """Two updates of two trees, K = 0."""
    config = Config(
        allocator=AllocatorConfig(rule=rule or RandomRuleConfig(), budget=BudgetConfig(continuations=continuations)),
        learner=LearnerConfig(steps=steps, batch_trees=batch, max_policy_lag=0),
        tracking=TrackingConfig(enabled=False),
    )  # fmt: skip
    config.allocator.max_score_staleness = staleness
    config.learner.loss.minibatches = 1
    return config


def tap(core: AllocatorCore, journal: JournalWriter) -> None:
    """Journal what the core is told and what it decides, as the loop does."""
    handle, tick, restart, take = core.handle, core.tick, core.restart, core.take_records
    kept: list[tuple[str, dict[str, Any]]] = []

    def drain() -> None:
        for kind, values in take():
            journal.append(kind, **values)
            kept.append((kind, values))

    def handled(peer: str, message: Message, now: float) -> Handled:
        journal.append("input", peer=peer, now=now, message=message)
        result = handle(peer, message, now)
        drain()
        return result

    def ticked(now: float) -> list[Send]:
        sends = tick(now)
        drain()
        return sends

    def restarted(boot: int, now: float) -> None:
        journal.append("recovered", boot=boot, now=now)
        restart(boot, now)
        drain()

    def took() -> list[tuple[str, dict[str, Any]]]:
        records, kept[:] = list(kept), []
        return records

    core.handle, core.tick, core.restart = handled, ticked, restarted  # type: ignore[method-assign]
    core.take_records = took  # type: ignore[method-assign]


class Journalled(Rig):
    """A rig over the core that `config` describes; `rundir` is what a run of it leaves behind."""

    def __init__(
        self, config: Config, folder: Path, rule: Rule | None = None, budget: Budget | None = None
    ) -> None:
        super().__init__(Settings.from_config(config, "r"))
        self.core = AllocatorCore.from_config(config, "r")
        if rule is not None or budget is not None:
            usual = self.core.state
            self.core = AllocatorCore(
                usual.settings, rule or usual.rule, budget or usual.budget, usual.predictor
            )
        self.config = config
        self.rundir = RunDir.create(folder, "r")
        self.writer = JournalWriter(self.rundir.allocator_journal)
        self.decided_by = {"settings": self.core.state.settings.decisive, "code": code_of_decisions()}
        self.writer.append("start", run="r", now=0.0, **self.decided_by)
        tap(self.core, self.writer)

    def restart(self, boot: int) -> None:
        """The allocator dies, and another process takes its books up."""
        self.writer.append("start", run="r", boot=boot, now=self.now, **self.decided_by)
        self.core.restart(boot, self.now)
        self.sent.clear()

    def say(self, peer: str, message: Message) -> Handled:
        if isinstance(message, Hello):
            message = msgspec.structs.replace(message, agreed=agreed_settings(self.config))
        return super().say(peer, message)

    def records(self) -> list[Record]:
        self.writer.flush(sync=False)
        return list(read_journal(self.rundir.allocator_journal))
