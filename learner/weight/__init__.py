"""Behaviour weights: the second axis of off-policy correction, chosen apart from the loss.

| weight      | π_old in the loss's ratio       | weight w of a token, detached, after the clip            |
|-------------|---------------------------------|----------------------------------------------------------|
| `none`      | behaviour                       | 1                                                        |
| `tis`       | proximal (start of the batch)   | min(π_prox / π_behaviour, cap): truncated                |
| `icepop`    | proximal (start of the batch)   | π_prox / π_behaviour, and 0 outside [floor, cap]: masked |
| `decoupled` | proximal: recomputed, or        | π_prox / π_behaviour, and 0 above cap: masked            |
|             | interpolated by version         |                                                          |

The cap is 2 for `tis` (verl), 5 for `icepop` (NeMo-RL) and `decoupled` (AReaL) in configs/learner/weight: to
mask at 2 would take the gradient of tokens that truncation keeps. Weights of tokens do not make data correct
at any lag: `docs/benchmarks.md` has the bias of each pair of loss and weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.weight.base import BehaviourWeight, TokenWeight
from learner.weight.decoupled import DECOUPLED
from learner.weight.icepop import ICEPOP
from learner.weight.none import NONE
from learner.weight.tis import TIS

WEIGHTS: Mapping[str, BehaviourWeight] = {"none": NONE, "tis": TIS, "icepop": ICEPOP, "decoupled": DECOUPLED}
"""`learner.weight.name` to its weight."""

__all__ = ["WEIGHTS", "BehaviourWeight", "TokenWeight"]
