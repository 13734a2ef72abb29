"""The replay of a journal: equal decisions are found equal, any other is found and named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from allocator.core import AllocatorCore
from allocator.replay import KEPT, Replay, replay
from allocator.rules.base import Decision, TreeView
from allocator.rules.random import RandomRule
from common.config_allocator import RandomRuleConfig, RuleConfig
from common.errors import StorageError
from common.journal import JournalWriter, Record, read_journal
from common.predictor import Prediction
from common.prefix import Prefix
from tests.allocator.journaled import Journalled, configuration, tap
from tests.allocator.test_fleet import FAULTY, fleet

Records = list[Record]


def worked(folder: Path, **changes: object) -> Journalled:
    """A small run by two actors, up to its first update."""
    rig = Journalled(configuration(**changes), folder)  # type: ignore[arg-type]
    rig.learner()
    for actor in ("a/1", "b/1"):
        rig.actor(actor, slots=3)
    while rig.work("a/1", turns=3) + rig.work("b/1", turns=2):
        rig.tick(0.2)
    return rig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Journalled:
    return worked(tmp_path_factory.mktemp("run"))


def numbers(core: AllocatorCore) -> dict[str, float]:
    """All but how often it was waiting: a tick that changed nothing is not in the journal."""
    return {name: value for name, value in core.stats().items() if not name.startswith("waiting/")}


def again(run: Journalled) -> AllocatorCore:
    return AllocatorCore.from_config(run.config, "r")


def test_the_same_core_decides_the_same(run: Journalled) -> None:
    player = Replay(again(run))
    for record in run.records():
        player.feed(record)
    assert player.finish() == [] and player.differing == player.unwritten == 0
    told = [r for r in run.records() if r.kind in ("input", "tick", "stopped")]
    assert player.inputs == len(told) > 30
    assert player.decisions == len(run.records()) - len(told) - 1 > 30, "all but the start"
    assert numbers(player.core) == numbers(run.core)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [RuleConfig(), RandomRuleConfig()], ids=["flat", "random"])
def test_a_faulty_fleet_replays(seed: int, rule: RuleConfig, tmp_path: Path) -> None:
    """Crashes, losses, duplicates and revoked leases included."""
    simulation = fleet(seed, rule, faults=FAULTY)
    with JournalWriter(tmp_path / "journal.tw") as journal:
        tap(simulation.core, journal)
        assert simulation.run(max_events=6000)["events"] > 1000
    fresh = fleet(seed, rule).core
    assert replay(fresh, read_journal(tmp_path / "journal.tw")) == []
    assert numbers(fresh) == numbers(simulation.core)


# ------------------------------------------------------------------------------------ planted changes


def changed(kind: str, field: str, value: object) -> Callable[[Records], Records]:
    """The first record of a kind tells something else."""

    def plant(records: Records) -> Records:
        index = next(i for i, record in enumerate(records) if record.kind == kind)
        found = records[index]
        records[index] = Record(kind, {**found.fields, field: value}, found.offset)
        return records

    return plant


def missing(kind: str) -> Callable[[Records], Records]:
    def plant(records: Records) -> Records:
        index = next(i for i, record in enumerate(records) if record.kind == kind)
        return records[:index] + records[index + 1 :]

    return plant


def added(records: Records) -> Records:
    index = next(i for i, record in enumerate(records) if record.kind == "lease_issued")
    return [*records[: index + 1], records[index], *records[index + 1 :]]


PLANTED: list[tuple[str, Callable[[Records], Records], str]] = [
    ("another actor", changed("lease_issued", "peer", "c/9"), r"byte \d+, lease_issued tree=0 number=0 epoch=0: peer was 'c/9', is 'a/1' in the replay"),
    ("more tokens", changed("turn_accepted", "tokens", 7), r"turn_accepted tree=\d number=\d epoch=0 offset=0: tokens was 7, is 1"),
    ("a lost record", missing("turn_accepted"), "the replay turn_accepted|the replay has turn_accepted"),
    ("a record too many", added, r"lease_issued tree=0 epoch=0: number was 0, is 1 in the replay"),
    ("another message", changed("input", "peer", "x/1"), "the replay nothing"),
]  # fmt: skip


@pytest.mark.parametrize(
    "plant, sentence", [(p, s) for _, p, s in PLANTED], ids=[name for name, _, _ in PLANTED]
)
def test_a_planted_change_is_found_and_named(
    plant: Callable[[Records], Records], sentence: str, run: Journalled
) -> None:
    found = replay(again(run), plant(run.records()))
    assert found and any(re.search(sentence, each) for each in found), found[:3]


class OtherDraws(RandomRule):
    """As many continuations at the same moments, from other anchors."""

    def decide(self, view: TreeView) -> Decision:
        decision = super().decide(view)
        picks = tuple(
            type(p)(random.Random(p.anchor).choice(view.anchors()), p.group) for p in decision.picks
        )
        return Decision(picks, decision.stops, decision.complete)


def test_another_anchor_is_noticed_though_all_the_counts_are_the_same(run: Journalled) -> None:
    rule = run.config.allocator.rule
    core = again(run)
    core.state.rule = core.state.forest.rule = OtherDraws(rule.chains, rule.expansions)  # type: ignore[attr-defined]
    found = replay(core, run.records())
    sentence = r"at byte \d+, decided tree=\d number=1: anchors\[\d\] was \d+, is \d+ in the replay"
    assert found and re.match(sentence, found[0]), found[:1]
    assert all(" decided " in each for each in found), "nothing else tells"


def test_a_weight_and_a_baseline_are_compared_too(run: Journalled) -> None:
    core = again(run)
    predict = core.state.predictor.predict

    def higher(prefix: Prefix, version: int | None = None) -> Prediction:
        said = predict(prefix, version)
        return Prediction(said.mean + 0.25, said.std)

    core.state.predictor.predict = higher  # type: ignore[method-assign]
    found = replay(core, run.records())
    assert "baselines[0] was 0.5, is 0.75 in the replay; baselines[1] was 0.5" in found[0]


def test_when_everything_differs_only_the_first_are_kept_and_all_are_counted(run: Journalled) -> None:
    player = Replay(AllocatorCore.from_config(configuration(RuleConfig(name="flat"), 2), "r"))
    for record in run.records() * 3:
        player.feed(record)
    assert len(player.finish()) == KEPT < player.differing


def test_a_run_that_was_taken_up_again_replays_across_the_restart(tmp_path: Path) -> None:
    rig = Journalled(configuration(), tmp_path)
    rig.learner()
    rig.actor("a/1", slots=3)
    rig.inspect("a/1")
    for lease in rig.leases("a/1"):
        rig.start("a/1", lease)
        rig.expand("a/1", lease, 0)
    rig.restart(boot=1)
    rig.learner(incarnation="2")
    rig.actor("a/2", slots=3)
    assert rig.work("a/2", turns=3) > 0 and len(rig.core.state.delivery.parcels) == 2
    ended = [r for r in rig.records() if r.kind == "lease_ended" and r.fields["kind"] == "fenced"]
    assert ended, "the restart fenced what was out"
    assert replay(again(rig), rig.records()) == []
    ended[0].fields["reason"] = "another"
    altered = [ended[0] if r.offset == ended[0].offset else r for r in rig.records()]
    assert "reason was 'another', is 'the allocator was restarted'" in replay(again(rig), altered)[0]


# ------------------------------------------------------------------------------- journals that break off


def test_a_journal_that_breaks_off_within_what_an_input_led_to_has_no_difference(run: Journalled) -> None:
    records = run.records()
    index = next(i for i, record in enumerate(records) if record.kind == "decided")
    player = Replay(again(run))
    for record in records[:index]:
        player.feed(record)
    assert player.finish() == [] and player.unwritten >= 2


def test_what_an_orderly_end_lacks_is_a_difference(run: Journalled) -> None:
    records = run.records()
    index = next(i for i, record in enumerate(records) if record.kind == "decided")
    end = Record("end", {"in_flight_trees": [], "in_flight_leases": []}, 1 << 30)
    found = replay(again(run), [*records[:index], end])
    assert found[0].startswith("the replay has decided tree=0 number=0") and "the journal nothing" in found[0]


@pytest.mark.parametrize(
    "fields",
    [{"peer": "a/1", "now": 1.0}, {"peer": "a/1", "now": 1.0, "message": {"type": "Nonsense"}}, {"now": 2.0}],
)
def test_an_input_that_cannot_be_read_is_one_sentence(fields: dict[str, object], run: Journalled) -> None:
    with pytest.raises(StorageError, match="at byte 77 a record 'input' that this release cannot replay"):
        replay(again(run), [Record("input", fields, 77)])
