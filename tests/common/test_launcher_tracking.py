"""The tracker beside a run: it may fail or never come, and what it was told and has kept is said at the end."""

import pytest

import common.launcher
from common.config import Config
from common.metrics import MetricsClient
from common.supervisor import RoleLost
from tests.common.launched import Launch


def test_the_tracker_is_told_that_a_run_has_failed(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    class Recorder(MetricsClient):
        def goodbye(self, code: int, reason: str) -> None:
            told.append((code, reason))

    monkeypatch.setattr(common.launcher, "MetricsClient", Recorder)
    launch.config.tracking.enabled = True
    launch.habits(learner="crash")
    with pytest.raises(RoleLost):
        launch.run()
    [(code, reason)] = told
    assert code == 4 and "the disk is full" in reason


def test_a_tracker_that_never_comes_does_not_stop_the_run(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.habits(tracker="never comes")
    monkeypatch.setattr(common.launcher, "TRACKER_START_S", 0.2)
    launch.config.tracking.enabled = True
    assert launch.run() == 0
    assert "the tracker is not ready after 0.2 s: going on" in launch.said()


def test_everyone_is_told_where_the_tracker_listens(launch: Launch) -> None:
    launch.config.tracking.enabled = True
    assert launch.run() == 0
    words = launch.seen_by("actor-0")["words"]
    [tracker] = [word for word in words if word.startswith("cluster.tracker=")]
    assert tracker != f"cluster.tracker={Config().cluster.tracker}"


@pytest.mark.parametrize(
    "files, uri, said",
    [
        (["mlflow.json"], "", "everything measured is shown by: make mlflow"),
        (["mlflow.json"], "http://u:secret@h:1", "everything measured is in http://h:1"),
        (["spool.jsonl"], "http://u:secret@h:1", "not all metrics have reached http://h:1 (see runs/"),
        (["mlflow.json", "spool.jsonl"], "", "not all metrics have reached sqlite:///runs/mlflow.db"),
        ([], "http://h:1", "metrics were not all recorded in http://h:1: see runs/"),
    ],
)
def test_the_last_lines_say_whether_the_metrics_arrived_where_they_should(
    files: list[str], uri: str, said: str, launch: Launch
) -> None:
    launch.habits(tracker=files)
    launch.config.tracking.enabled, launch.config.tracking.uri = True, uri
    assert launch.run() == 0
    line = launch.lines()[-2]
    assert said in line and "secret" not in line
    assert ("make mlflow" in line) == ("make mlflow" in said)
    assert ("python run.py role=tracker run=runs/" in line) == ("spool.jsonl" in files)


def test_a_warning_of_the_tracker_is_shown_while_the_run_goes_on(launch: Launch) -> None:
    launch.habits(tracker="warn")
    launch.config.tracking.enabled = True
    assert launch.run() == 0
    assert "tracker: MLflow failed, metrics wait in the spool" in launch.said()
