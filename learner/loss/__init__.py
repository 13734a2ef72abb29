"""Policy losses: the first axis of off-policy correction. One small module per method.

| loss        | ratio of | against   | what a bound does                                      |
|-------------|----------|-----------|--------------------------------------------------------|
| `ppo`       | a token  | π_old     | takes the gradient                                     |
| `cispo`     | a token  | π_old     | cuts the weight, keeps the gradient                    |
| `gspo`      | a branch | π_old     | takes the gradient                                     |
| `topr`      | a branch | behaviour | cuts the weight of negative advantages to at most 1    |
| `dppo`      | a token  | behaviour | takes the gradient, by the difference of probabilities |
| `reinforce` | –        | –         | –                                                      |

π_old is the behaviour policy or the proximal one, as `learner.weight` says. Losses against the behaviour
policy bring the whole correction and refuse every weight but `none`.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.config_learner import LOSS_WEIGHTS
from learner.loss.base import Loss, PolicyLoss, TokenLoss
from learner.loss.cispo import cispo
from learner.loss.dppo import dppo
from learner.loss.gspo import gspo
from learner.loss.ppo import ppo
from learner.loss.reinforce import reinforce
from learner.loss.topr import topr


def _entry(name: str, function: Loss, **more: bool) -> PolicyLoss:
    return PolicyLoss(function, frozenset(LOSS_WEIGHTS[name]), **more)


LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": _entry("ppo", ppo),
    "cispo": _entry("cispo", cispo),
    "gspo": _entry("gspo", gspo, whole_branches=True),
    "topr": _entry("topr", topr, whole_branches=True),
    "dppo": _entry("dppo", dppo, trains_unpaid=True),
    "reinforce": _entry("reinforce", reinforce),
}
"""`learner.loss.name` to its loss."""

__all__ = ["LOSSES", "Loss", "PolicyLoss", "TokenLoss"]
