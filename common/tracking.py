"""MLflow, and the only file that knows it: one run, its params, its configuration and batches of metrics.

Everything here may block for as long as a database or a server pleases, so it is called on the tracker's own
thread (`common.tracker`) and nowhere else. mlflow is imported when the run is opened: it takes seconds.
What MLflow would refuse is mended first, so that no metric is lost to a name: see `clean_name`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.config import Config, to_plain
from common.rundir import write_json_atomic

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOG = logging.getLogger("treeward.tracking")

ID_FILE = "mlflow.json"
"""In the run's `tracking/`: the MLflow run that it is recorded in."""
MAX_PARAM = 500
"""Older servers refuse longer values; the whole configuration is an artifact anyway."""
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1_000
MAX_KEY = 250
REFUSED = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Errors that the same request would meet again."""
_INVALID = re.compile(r"[^A-Za-z0-9_\-. :/]")

ENVIRONMENT = {
    # A request that hangs holds up the tracker's thread and its spool, never the training; but not for hours.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Defaults for mlflow; what the user has set wins."""


class Row(NamedTuple):
    """One number of one metric. `when_ms` is wall-clock time in milliseconds, as MLflow wants it."""

    name: str
    value: float
    step: int
    when_ms: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a run is recorded, and where its MLflow run id is kept for a later process."""

    uri: str
    experiment: str
    run_name: str
    artifacts: str | None
    """Artifact location of a new experiment; None leaves it to the server."""
    id_file: Path


def destination(config: Config, run_name: str, tracking_dir: Path) -> Destination:
    """The one the configuration asks for: by default SQLite and a folder beside it in `runs_dir`.

    A run that is recorded in such a file already stays there, from whatever directory it is continued.
    """
    runs_dir = Path(config.runs_dir).absolute()
    usual = f"sqlite:///{runs_dir / 'mlflow.db'}"
    before = str(_entry(tracking_dir / ID_FILE).get("uri", ""))
    if before.startswith("sqlite:///") and Path(before.removeprefix("sqlite:///")).is_file():
        usual, runs_dir = before, Path(before.removeprefix("sqlite:///")).parent
    uri = config.tracking.uri or usual
    artifacts = (runs_dir / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None
    return Destination(uri, config.tracking.experiment, run_name, artifacts, tracking_dir / ID_FILE)


def recorded_run(tracking_dir: Path) -> str:
    """Id of the MLflow run that a run is recorded in; empty where it is in none yet."""
    return str(_entry(tracking_dir / ID_FILE).get("run_id", ""))


def _entry(id_file: Path) -> dict[str, Any]:
    try:
        found = json.loads(id_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class MlflowRun:
    """One MLflow run. Every method may block and may raise whatever mlflow and its libraries raise."""

    def __init__(self, destination: Destination) -> None:
        self._to = destination
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._described = False

    def open(self, params: dict[str, str], config_text: str) -> str:
        """Make the run, or take up the one that an earlier process of this run made. Returns its id.

        Safe to call again after a failure: it goes on where it stopped.
        """
        if self._client is None:
            self._client = _client(self._to.uri)
        if not self._run_id:
            self._run_id = self._resumed() or self._created()
        if not self._described:
            self._describe(params, config_text)
            self._described = True
        return self._run_id

    def _resumed(self) -> str:
        found = _entry(self._to.id_file)
        if (found.get("uri"), found.get("experiment")) != (self._to.uri, self._to.experiment):
            return ""
        self._opened().update_run(found["run_id"], status="RUNNING")
        return str(found["run_id"])

    def _created(self) -> str:
        client = self._opened()
        experiment = client.get_experiment_by_name(self._to.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(
                self._to.experiment, artifact_location=self._to.artifacts
            )
        else:
            experiment_id = experiment.experiment_id
        run = client.create_run(experiment_id, run_name=self._to.run_name)
        run_id: str = run.info.run_id
        entry = {"run_id": run_id, "uri": self._to.uri, "experiment": self._to.experiment}
        write_json_atomic(self._to.id_file, entry)
        return run_id

    def _describe(self, params: dict[str, str], config_text: str) -> None:
        """Params that the run does not have yet (they cannot be changed) and the configuration as a file."""
        from mlflow.entities import Param

        client = self._opened()
        known = client.get_run(self._run_id).data.params
        missing = [Param(key, value) for key, value in clean_params(params).items() if key not in known]
        for part in _parts(missing, MAX_PARAMS_PER_BATCH):
            client.log_batch(self._run_id, params=part)
        client.log_text(self._run_id, config_text, "config.yaml")

    def log(self, rows: Sequence[Row]) -> int:
        """Record `rows`; returns how many of them MLflow refuses for good. Repeats are harmless."""
        from mlflow.entities import Metric

        metrics = [Metric(row.name, row.value, row.when_ms, row.step) for row in rows]
        return sum(self._log_batch(part) for part in _parts(metrics, MAX_METRICS_PER_BATCH))

    def _log_batch(self, metrics: list[Any]) -> int:
        """One refused metric must not take the rest of its batch along: halve until it stands alone."""
        from mlflow.exceptions import MlflowException

        try:
            self._opened().log_batch(self._run_id, metrics=metrics)
        except MlflowException as error:
            if error.error_code not in REFUSED:
                raise
            if len(metrics) == 1:
                LOG.warning("MLflow refuses the metric %s: %s", metrics[0].key, error)
                return 1
            middle = len(metrics) // 2
            return self._log_batch(metrics[:middle]) + self._log_batch(metrics[middle:])
        return 0

    def finish(self, status: str) -> None:
        """Close the run as `FINISHED` or `FAILED`."""
        self._opened().set_terminated(self._run_id, status)

    def _opened(self) -> MlflowClient:
        if self._client is None:
            raise RuntimeError("the MLflow run is used before it was opened")
        return self._client


def _client(uri: str) -> MlflowClient:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # importing mlflow sets its own level
        logging.getLogger(name).setLevel(logging.WARNING)
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri)


def _parts(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def clean_name(name: str) -> str:
    """`name` as MLflow takes it: its letters, no empty or dotted path parts, at most 250 characters.

    Example: `loss//top@1` becomes `loss/top_1`.
    """
    parts = [part.strip() for part in _INVALID.sub("_", name).split("/")]
    kept = "/".join(part for part in parts if part.strip("."))
    return kept[:MAX_KEY].rstrip("/ ") or "unnamed"


def clean_params(params: dict[str, str]) -> dict[str, str]:
    """Params with valid names and values of at most `MAX_PARAM` characters."""
    return {clean_name(key): value[:MAX_PARAM] for key, value in params.items()}


def flat_params(config: Config) -> dict[str, str]:
    """Every setting of the run under its dotted name, as text; `role` is the tracker's own and left out."""
    found: dict[str, str] = {}
    _flatten("", {key: value for key, value in to_plain(config).items() if key != "role"}, found)
    return found


def _flatten(prefix: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, found)
    else:
        found[prefix] = value if isinstance(value, str) else json.dumps(value)
