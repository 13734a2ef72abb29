"""Success predictors by name: a closed registry."""

from __future__ import annotations

from common.config_allocator import PredictorConfig
from common.errors import ConfigError, nearest
from common.predictor import HistoryPredictor, Predictor

NAMES = ("history", "shared")


def make_predictor(config: PredictorConfig) -> Predictor:
    """The predictor that `allocator.predictor` names. Raises `ConfigError` for an unknown one."""
    if config.name in NAMES:
        return HistoryPredictor()
    raise ConfigError(
        f"allocator.predictor.name must be one of {', '.join(NAMES)}{nearest(config.name, NAMES)}, "
        f"got {config.name!r}"
    )
