"""Credits and group filters in the configuration: what goes together, and what is refused with a sentence."""

import pytest

from common.config import CREDITS, GROUP_FILTERS
from common.config_learner import (
    CREDIT_DEMANDS,
    LOSS_WEIGHTS,
    CreditConfig,
    GroupFilterConfig,
    check_credit,
)
from common.errors import ConfigError


def test_the_names_that_can_be_chosen_are_the_credits_there_are():
    from learner.credit import CREDITS as METHODS

    assert set(CREDITS) == set(METHODS)
    assert set(GROUP_FILTERS) == {"none", "mixed"}


def test_a_credit_with_ratios_of_its_own_goes_with_reinforce_and_no_weight_alone():
    vtrace = CreditConfig(name="tree_vtrace")
    check_credit(vtrace, "reinforce", "none")
    for loss, weights in LOSS_WEIGHTS.items():
        for weight in weights:
            check_credit(CreditConfig(), loss, weight)
            if (loss, weight) != CREDIT_DEMANDS["tree_vtrace"]:
                with pytest.raises(ConfigError, match="which carries its own ratios"):
                    check_credit(vtrace, loss, weight)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(rho_bar=1.0, c_bar=2.0), r"learner\.credit\.c_bar must be positive, and at most"),
        (dict(rho_bar=float("inf")), r"learner\.credit\.rho_bar must be positive"),
        (dict(tolerance=-1.0), r"learner\.credit\.tolerance must be 0 or more"),
        (dict(epsilon=0.0), r"learner\.credit\.epsilon must be positive"),
        (
            dict(critic="heat"),
            r"learner\.credit\.critic must be one of grant, head \(did you mean 'head'\?\)",
        ),
        (dict(critic="head"), "grant unless learner.credit=tree_vtrace"),
        (dict(node_value="mean"), r"learner\.credit\.node_value must be one of children, leaves"),
        (dict(edge_weight="all"), r"learner\.credit\.edge_weight must be one of granted, path"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        CreditConfig(**settings)


def test_a_filter_has_a_tolerance_of_0_or_more():
    with pytest.raises(ConfigError, match=r"learner\.filter\.tolerance must be 0 or more"):
        GroupFilterConfig(tolerance=float("nan"))
