"""Credit estimators: what each turn of each branch is paid. One small pure module per method."""

from __future__ import annotations

from collections.abc import Mapping

from learner.credit.base import BranchCredit, Credit
from learner.credit.granted import granted
from learner.credit.grpo import grpo

CREDITS: Mapping[str, Credit] = {"granted": granted, "grpo": grpo}
"""`learner.credit.name` to its function."""

__all__ = ["CREDITS", "BranchCredit", "Credit"]
