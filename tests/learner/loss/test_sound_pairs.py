"""Which behaviour weights may stand beside which loss, and that others are refused before anything starts."""

import pytest

from common.config import BEHAVIOUR_WEIGHTS
from common.config_learner import LOSS_WEIGHTS
from common.errors import ConfigError
from learner.loss import LOSSES
from learner.weight import WEIGHTS
from tests.learner.loss.cases import SETTINGS, Case, Pair, Token, loss_of
from tests.run.door import compose

PAIRS = [(loss, weight) for loss in LOSS_WEIGHTS for weight in BEHAVIOUR_WEIGHTS]


@pytest.mark.parametrize("loss, weight", PAIRS)
def test_a_sound_pair_composes_and_another_is_refused_in_one_sentence(loss, weight):
    words = (f"learner/loss={loss}", f"learner/weight={weight}")
    if weight in LOSSES[loss].weights:
        config = compose(*words).learner
        assert (config.loss.name, config.weight.name) == (loss, weight)
    else:
        with pytest.raises(ConfigError, match=f"learner.weight must be none with learner.loss={loss}, which"):
            compose(*words)


def test_the_table_without_torch_is_the_registries():
    assert {name: set(loss.weights) for name, loss in LOSSES.items()} == {
        name: set(weights) for name, weights in LOSS_WEIGHTS.items()
    }
    assert set().union(*LOSS_WEIGHTS.values()) == set(WEIGHTS)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_brings_its_own_ratio_to_the_behaviour_policy_takes_no_other_weight(name):
    """Whatever π_old is, its gradient is the same: a weight π_prox / μ would then be one correction too many."""
    gradients = [
        loss_of(name, Case([Token(-2.0, old, -1.7)], [Pair(0, 0, -1.0)]), SETTINGS[name])[1]
        for old in (-2.05, -1.9)
    ]
    brings_its_own = gradients[0] == gradients[1] and name != "reinforce"
    assert brings_its_own is (LOSSES[name].weights == {"none"})
