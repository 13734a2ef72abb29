"""Stand-ins for the roles, for tests of the launcher: they say and write what the real ones would.

python fake_role.py ROLE key=value …       what each does is in TREEWARD_FAKE, as JSON: {"learner": "crash"}
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

ROLE = sys.argv[1]
WORDS = dict(word.split("=", 1) for word in sys.argv[2:])
HABITS = json.loads(os.environ.get("TREEWARD_FAKE", "{}"))
HABIT = HABITS.get(ROLE, "")
WARNING = "MLflow failed, metrics wait in the spool: no answer"


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").replace(path)


def listen(run: Path) -> None:
    content = {"endpoint": f"tcp://127.0.0.1:{os.getpid()}", "host": socket.gethostname(), "pid": os.getpid()}
    put(run / "endpoints" / f"{ROLE}.json", content)


def until(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def allocator(run: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common.journal import JournalWriter

    path = run / "allocator" / "journal.tw"
    again = path.is_file()
    with JournalWriter(path) as journal:
        if again:
            journal.append("start", boot=1)
            journal.append("end", in_flight_trees=[], in_flight_leases=[])
            return wait_for_the_end(run)
        journal.append("tree_opened", tree=0, task="t", wave=0)
        if HABIT != "lose a tree":
            journal.append("tree_dropped", tree=0, reason="no_outcome", tokens=0)
        journal.append("end", in_flight_trees=[], in_flight_leases=[])
    wait_for_the_end(run)


def wait_for_the_end(run: Path) -> None:
    listen(run)
    until((run / "finished").exists)
    if HABIT == "stay":
        until(lambda: False)


def learner(run: Path) -> None:
    if HABIT == "crash":
        print("error: the disk is full", file=sys.stderr)
        raise SystemExit(4)
    if HABIT == "die once" and not (run / "died").exists():
        (run / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    log = run / "logs" / "learner.log"
    for step in (1, 2):
        entry = {"event": "progress", "step": step, "success": 0.25 * step, "tokens_per_s": 900.4, "lag": 0.5}
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        time.sleep(0.15)
    if HABIT == "endless":
        (run / "training").touch()
        until(lambda: False)
    until(lambda: len(list(run.glob("actors/*/journal.tw"))) >= int(HABITS.get("actors", 1)))
    (run / "finished").touch()


def actor() -> None:
    here = Path.cwd()
    if not (here / "seen.json").exists():
        put(here / "seen.json", {"words": sys.argv[2:], "found": [p.name for p in here.iterdir()]})
        if HABIT == "crash once":
            print("out of luck", file=sys.stderr)
            raise SystemExit(1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common.journal import JournalWriter

    with JournalWriter(here / "journal.tw") as journal:
        journal.append("start", peer=WORDS["actor.name"], incarnation="x")
        journal.append("end")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    until((here.parents[1] / "finished").exists)


def main() -> None:
    run = Path(WORDS.get("run", ""))
    match ROLE:
        case "allocator":
            allocator(run)
        case "learner":
            learner(run)
        case "actor":
            actor()
        case "tracker":
            for name in HABIT if isinstance(HABIT, list) else ():
                put(run / "tracking" / name, {})
            if HABIT == "warn":
                put(run / "logs" / "tracker.log", {"level": "warning", "message": WARNING})
                with (run / "logs" / "tracker.log").open("a") as file:
                    file.write("\n")
            if HABIT != "never comes":
                listen(run)
            until(lambda: False)
        case "warmstart":
            put(run / "warmstart" / "model" / "config.json", {})
        case "eval":
            evaluation(run)


def evaluation(run: Path) -> None:
    after = (run / "finished").exists()
    sampled, greedy = ((0.41, 0.55), (0.78, 0.84))[after]
    put(run / "eval" / f"{WORDS.get('eval.name', 'x')}.json", {
        "sampled": {"success": sampled, "low": sampled - 0.05, "high": sampled + 0.05, "tasks": 200},
        "greedy": {"success": greedy, "low": greedy - 0.05, "high": greedy + 0.05, "tasks": 200},
        "checkpoint": WORDS["eval.checkpoint"],
    })  # fmt: skip


main()
