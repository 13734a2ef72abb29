"""`shared`: one success predictor for prompts and prefixes of all trees, learned while the policy learns.

After TRACE (arXiv 2606.11119), which fits one network to prompts and prefixes alike. What is known of the
paper says neither how it is built nor how it is kept calibrated: both are reconstructions here. Where the
paper averages over realised children, each continuation is one term of the loss, at its own anchor and at
the turns it sampled: averages are biased as soon as branching looks at outcomes.

    targets of a wave ─┬─▶ grade: what was predicted, against what came        (Brier, ECE, AUC)
                       ├─▶ recalibrate: slope and shift of the version before  (calibration.Platt)
                       ├─▶ forget and learn                                    (success_fit.Posterior)
                       └─▶ freeze: a new version                               (success_model.Model)

Beside it `history`, the Beta posterior per depth, gets the same targets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.calibration import Meter, Platt, auc
from common.predictor import (
    DISCOUNT,
    HistoryPredictor,
    Prediction,
    Predictor,
    Target,
    check_kind,
    predicted_and_outcome,
)
from common.predictor_inputs import DESCRIBED, Floats, Rows, encode, width_of
from common.prefix import Prefix
from common.success_fit import Posterior
from common.success_model import Model
from common.versions import Shelf


class SharedPredictor(Predictor):
    """Bayesian Beta-logistic regression over what is known of a prefix; see the modules it is made of.

    `strength` is the prior's standard deviation of a weight; `features` whether the engine's are used;
    `recalibrate` whether the log-odds are put right by the outcomes of the wave before.
    """

    def __init__(
        self,
        discount: float = DISCOUNT,
        strength: float = 1.0,
        features: bool = True,
        recalibrate: bool = True,
    ) -> None:
        self.version = 0
        self._features, self._recalibrate = features, recalibrate
        self._posterior = Posterior(discount, strength)
        self._platt = Platt()
        self._history = HistoryPredictor(discount)
        self._used, self._fresh = Meter(), Meter()
        """Predictions as they were used, and those that the newest version would have made."""
        self._seen: dict[str, float] = {}
        self._taught = False
        """Whether the newest model has seen any outcome."""
        """Other numbers about the last wave."""
        self._models = Shelf(self._posterior.freeze(self._platt))

    # --- versions ----------------------------------------------------------------------------------------

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        return self._models.get(version).predict(prefix)

    def pin(self, version: int) -> None:
        self._models.pin(version)

    def unpin(self, version: int) -> None:
        self._models.unpin(version)

    def pinned(self) -> Counter[int]:
        return Counter(self._models.pins)

    def kept(self) -> list[int]:
        """Versions that can still be predicted with."""
        return self._models.kept()

    # --- learning ----------------------------------------------------------------------------------------

    def update(self, targets: Sequence[Target]) -> int:
        if targets:
            self._learn(targets)
        else:
            self._history.update(targets)
            self._posterior.forget()
        self.version = self._models.put(self._posterior.freeze(self._platt))
        return self.version

    def _learn(self, targets: Sequence[Target]) -> None:
        prefixes = [target.prefix for target in targets]
        outcomes = np.clip(np.array([target.outcome for target in targets]), 0.0, 1.0)
        # See `success_fit`: the mean share, the same for all.
        weight = math.fsum(target.share for target in targets) / len(targets)
        rows = encode(prefixes, self._posterior.width)
        raw = self._models.get().means(rows)
        self._grade(targets, raw, outcomes)
        if self._recalibrate and self._taught:  # what ignorance says needs evidence, not a correction
            self._platt.fit(raw, outcomes, weight)
        if self._features and self._posterior.widen(width_of(prefixes)):
            rows = encode(prefixes, self._posterior.width)
        self._posterior.rescale(rows.features[rows.columns[:, DESCRIBED] > 0])
        self._posterior.forget()
        self._taught = True
        steps = self._posterior.learn(_with_siblings(rows, targets), outcomes, weight)
        self._seen |= {"continuations": weight * len(targets), "steps": steps}
        self._seen["described"] = float(rows.columns[:, DESCRIBED].mean())

    def _grade(self, targets: Sequence[Target], raw: Floats, outcomes: Floats) -> None:
        """Score what was predicted, what the newest version predicts, and what `history` does."""
        fresh = self._platt.apply(raw)
        self._fresh.record(fresh, outcomes)
        self._used.record(*predicted_and_outcome(targets))
        beside = [Target(t.prefix, self._history.predict(t.prefix).mean, t.outcome) for t in targets]
        self._history.update(beside)
        rank = auc(fresh, outcomes)
        self._seen = {"terms": len(targets), "success": float(outcomes.mean())}
        self._seen |= {} if rank is None else {"auc": rank}

    def stats(self) -> dict[str, float]:
        """`brier` and `ece` of the predictions as they were used, `fresh/…` of those that the version just
        before the update makes, `history/…` of the Beta model at the same moment; `slope` and `shift` of the
        recalibration; `concentration` κ of prompts; and of the last wave `terms`, `continuations`, `success`,
        `auc` (of the fresh predictions), `described` (share with engine features), Newton `steps`."""
        values = self._used.stats() | self._seen
        values |= {"slope": self._platt.slope, "shift": self._platt.shift}
        values["concentration"] = math.exp(float(self._posterior.mean[0]))
        values |= {f"fresh/{name}": value for name, value in self._fresh.stats().items()}
        values |= {f"history/{name}": value for name, value in self._history.stats().items()}
        return values

    # --- state -------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        return {
            "kind": "shared",
            "posterior": self._posterior.to_state(),
            "platt": self._platt.to_state(),
            "history": self._history.to_state(),
            "meters": [self._used.to_state(), self._fresh.to_state()],
            "seen": dict(self._seen),
            "taught": self._taught,
            "models": self._models.to_state(Model.to_state),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        check_kind(state, "shared")
        models = Shelf.from_state(state["models"], Model.from_state)
        used, fresh = (Meter.from_state(meter) for meter in state["meters"])
        platt = Platt.from_state(state["platt"])
        self._history.from_state(state["history"])
        self._posterior.become(state["posterior"])
        self._models, self._platt, self._used, self._fresh = models, platt, used, fresh
        self._seen, self._taught = dict(state["seen"]), state["taught"]
        self.version = models.version


def _with_siblings(rows: Rows, targets: Sequence[Target]) -> Rows:
    """The rows a target learns from: its siblings' outcomes count as known."""
    beside = np.array([(t.beside.wins, t.beside.trials) for t in targets], dtype=np.float64)
    wins, trials = rows.wins + beside[:, 0], rows.trials + beside[:, 1]
    return Rows(rows.columns, rows.features, wins, trials, rows.reach)
