"""Success predictors by name: a closed registry."""

from __future__ import annotations

from common.config_allocator import PREDICTORS, PredictorConfig
from common.errors import ConfigError, nearest
from common.predictor import HistoryPredictor, Predictor
from common.shared_predictor import SharedPredictor


def make_predictor(config: PredictorConfig) -> Predictor:
    """The predictor that `allocator.predictor` names. Raises `ConfigError` for an unknown one."""
    match config.name:
        case "history":
            return HistoryPredictor(config.discount)
        case "shared":
            return SharedPredictor(config.discount, config.strength, config.features, config.recalibrate)
    raise ConfigError(
        f"allocator.predictor.name must be one of {', '.join(PREDICTORS)}"
        f"{nearest(config.name, PREDICTORS)}, got {config.name!r}"
    )
