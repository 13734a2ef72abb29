"""Behaviour weights: the second axis of off-policy correction, chosen apart from the loss.

| weight      | π_old in the loss's ratio       | weight w of a token, detached, after the clip      |
|-------------|---------------------------------|----------------------------------------------------|
| `none`      | behaviour                       | 1                                                  |
| `tis`       | proximal (start of the batch)   | min(π_prox / π_behaviour, cap): truncated          |
| `decoupled` | proximal (start of the batch)   | π_prox / π_behaviour, and 0 where above cap: masked |

The cap is 2 for `tis` (verl) and 5 for `decoupled` (AReaL) in configs/learner/weight: to mask at 2 would take
the gradient of tokens that truncation keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.weight.base import BehaviourWeight, TokenWeight
from learner.weight.decoupled import DECOUPLED
from learner.weight.none import NONE
from learner.weight.tis import TIS

WEIGHTS: Mapping[str, BehaviourWeight] = {"none": NONE, "tis": TIS, "decoupled": DECOUPLED}
"""`learner.weight.name` to its weight."""

__all__ = ["WEIGHTS", "BehaviourWeight", "TokenWeight"]
