"""The plain policy gradient: no ratio touches it."""

import pytest

from learner.loss import LOSSES
from tests.learner.loss.cases import SETTINGS, Case, Pair, Token, loss_of


@pytest.mark.parametrize("old", [-9.0, -2.0, -0.01])
def test_no_ratio_and_no_clip_touch_the_gradient(old):
    case = Case([Token(-2.0, old, old)], [Pair(0, 0, 1.5, 0.5), Pair(0, 1, -1.0)])
    loss, gradient = loss_of("reinforce", case)
    assert (loss, gradient) == (pytest.approx([-0.5]), pytest.approx([0.25]))
    assert not LOSSES["reinforce"].function(case.streams(), SETTINGS["reinforce"]).clipped.any()
