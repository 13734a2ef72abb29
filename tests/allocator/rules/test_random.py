"""What `flat` and `random` say of their choices; how they choose is in `tests/allocator/test_rules.py`."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from allocator.rules.flat import FlatRule
from allocator.rules.random import RandomRule
from common.nouns import ROOT
from tests.allocator.rules.garden import Garden


def test_flat_has_only_the_prompt_to_choose() -> None:
    garden = Garden(FlatRule(), 4)
    assert [(each.anchor, each.total) for each in garden.forest.rule.explain(garden.tree)] == [(ROOT, 1.0)]


def test_random_explains_its_draws_as_often_as_they_happen() -> None:
    """Two chains of three and two turns: the prompt is in both of them."""
    rule = RandomRule(chains=2, expansions=4000)
    garden = Garden(rule, 8002)
    assert [(each.anchor, each.terms) for each in rule.explain(garden.tree)] == [(ROOT, {"missing": 2.0})]
    for branch, turns in zip(garden.grow(*garden.decide().picks), (3, 2), strict=True):
        for left in reversed(range(turns)):
            garden.turn(branch, last=left == 0)
        garden.end(branch, 1.0)
    scored = {each.anchor: each for each in rule.explain(garden.tree)}
    assert scored[ROOT].terms == {"chain 0": pytest.approx(1 / 3), "chain 1": pytest.approx(1 / 2)}
    assert sum(each.total for each in scored.values()) == pytest.approx(1.0)
    drawn = Counter(pick.anchor for pick in garden.decide().picks)
    assert drawn.keys() == scored.keys()
    for anchor, each in scored.items():
        assert drawn[anchor] / 8000 == pytest.approx(each.total, abs=0.02)
    assert all(a.total >= b.total for a, b in pairwise(rule.explain(garden.tree)))
