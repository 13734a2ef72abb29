"""The learner, a real process among real processes, killed with -9: it goes on as if nothing had been."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.forked import Roles
from benchmarks.learner_kills import STEPS, Kill, Killer, Ring, run_round, warm_start
from common.audit import audit_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def model(work: Path) -> Path:
    return warm_start(work)


@pytest.fixture(scope="module")
def undisturbed(work: Path, model: Path) -> dict[str, str]:
    """SHA-256 of the weights after each update."""
    _, left = run_round(work / "undisturbed", model, 0, "")
    assert len(set(left["hashes"].values())) == STEPS + 1, "every update changes something"
    return dict(left["hashes"])


class Each(Killer):
    """At each moment in turn."""

    def strike_at(self, aim: str) -> Kill:
        self._draw = Chosen(aim)
        kill = self.strike()
        assert kill is not None, "the run ended before the test had killed its learner"
        return kill


class Chosen(random.Random):
    """Draws one moment whenever one is to be chosen."""

    def __init__(self, aim: str) -> None:
        super().__init__(3)
        self._aim = aim

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return self._aim if self._aim in seq else super().choice(seq)


def test_a_learner_killed_in_step_in_save_and_before_its_word_goes_on_from_its_newest_checkpoint(
    work: Path, model: Path, undisturbed: dict[str, str]
) -> None:
    """Nothing is lost, nothing is trained twice, and the weights are those of a run that nobody disturbed."""
    with Roles(work / "killed-logs") as roles:
        ring = Ring(work / "killed", model, roles)
        ring.begin()
        killer = Each(ring, random.Random())
        kills = [killer.strike_at(aim) for aim in ("step", "save", "saved", "save", "step")]
        roles.join()
    assert all(kill.right for kill in kills), kills
    assert {"save", "saved"} <= {kill.moment for kill in kills}, "no kill met a save, or its word on the way"
    assert {str(step): sha for step, sha in ring.checkpoints().items()} == undisturbed
    report = audit_run(ring.rundir)
    assert report.ok, [*report.lines()]
    lineages = [record.fields["lineage"] for record in ring.written("start")]
    assert lineages == list(range(len(kills) + 1)), "each start is a lineage of its own"
