"""The run directory: everything a run leaves behind, at places that every role knows.

    <runs_dir>/<run>/
        run.json               id, creation time, layout version: what makes the directory a run
        config.yaml            the resolved configuration
        endpoints/<role>.json  where a role listens (needed when port 0 was asked for)
        locks/<role>.lock      one process per role
        warmstart/             demos.tw, tokenizer.json, model/
        allocator/journal.tw   allocator/snapshots/   learner/journal.tw   learner/checkpoints/step-00000012/
        actors/<name>/         an actor's working directory when role=local starts it
        logs/<role>.log        JSON lines
        eval/<name>.json       results of held-out evaluations
        tracking/              spool of metrics that the tracking server has not taken yet

Actors on other machines have no run directory: they work in a directory of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import PeerLost, StorageError
from common.journal import fsync_dir

LAYOUT = 1
NAME = re.compile(r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}$")
POLL_S = 0.05
"""How often a waiting role looks for an endpoint file."""


class RoleLock:
    """An flock on `locks/<role>.lock`, held until `release` or until the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            raise StorageError(f"{path} is held by {_describe(holder)}; stop that process first") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(_this_process()).encode(), 0)

    def release(self) -> None:
        """Let the next process in. Releasing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RoleLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RunDir:
    """Paths of one run, with the few files that its roles share. Folders are made when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def create(cls, runs_dir: Path, name: str | None = None) -> RunDir:
        """A new run directory, named by date and a random suffix unless `name` is given.

        Raises:
            StorageError: the name is no plain file name, exists already, or cannot be made.
        """
        name = name or f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        if not NAME.match(name):
            raise StorageError(f"a run must be named with letters, digits, '.', '_' and '-', got {name!r}")
        path = runs_dir / name
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the directory of runs {runs_dir}: {error.strerror}; name another with runs_dir="
            ) from error
        try:
            path.mkdir()
        except FileExistsError as error:
            raise StorageError(
                f"{path} exists already; open it with run={path}, or choose another name"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}") from error
        run = cls(path)
        run.write_json_atomic(run.path / "run.json", {"id": name, "layout": LAYOUT, **_this_process()})
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run directory at `path`.

        Raises:
            StorageError: there is none, or it was made by a release with another layout.
        """
        run = cls(path)
        try:
            found = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
            layout = found["layout"]
        except FileNotFoundError as error:
            raise StorageError(
                f"{path} is not a run directory (it has no run.json); give run= the directory of a run"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"cannot read {run.path / 'run.json'}: {error}") from error
        if layout != LAYOUT:
            raise StorageError(f"{path} has layout {layout}, this release reads layout {LAYOUT}")
        return run

    @property
    def id(self) -> str:
        """Name of the run: its directory's name."""
        return self.path.name

    @property
    def born(self) -> str:
        """Which run this is, wherever its directory lies and whatever it is called now: the name and the time
        that it was made with. Empty where that cannot be read."""
        try:
            found = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return f"{found['id']} of {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def warmstart(self) -> Path:
        return self._folder("warmstart")

    @property
    def demonstrations_file(self) -> Path:
        return self.warmstart / "demos.tw"

    @property
    def warmstart_model(self) -> Path:
        return self.warmstart / "model"

    @property
    def allocator_journal(self) -> Path:
        return self._folder("allocator") / "journal.tw"

    @property
    def allocator_snapshots(self) -> Path:
        return self._folder("allocator/snapshots")

    @property
    def learner_journal(self) -> Path:
        return self._folder("learner") / "journal.tw"

    @property
    def checkpoints(self) -> Path:
        return self._folder("learner/checkpoints")

    @property
    def tracking(self) -> Path:
        return self._folder("tracking")

    def actor_dir(self, name: str) -> Path:
        return self._folder(f"actors/{_plain(name)}")

    def log_file(self, role: str) -> Path:
        return self._folder("logs") / f"{_plain(role)}.log"

    def eval_file(self, name: str) -> Path:
        return self._folder("eval") / f"{_plain(name)}.json"

    def _folder(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def lock(self, role: str) -> RoleLock:
        """Be the only process of `role` on this run.

        Raises:
            StorageError: another process is; the message names its host, pid and start.
        """
        return RoleLock(self.path / "locks" / f"{_plain(role)}.lock")

    def publish_endpoint(self, role: str, endpoint: str) -> None:
        """Tell the roles of this machine where `role` listens."""
        content = {"endpoint": endpoint, **_this_process()}
        self.write_json_atomic(self._folder("endpoints") / f"{_plain(role)}.json", content)

    def endpoint(self, role: str) -> str | None:
        """Where `role` listens, or None while it has not said so or its process is gone."""
        found = self._published(role)
        if found is None or (found["host"] == socket.gethostname() and not _alive(found["pid"])):
            return None
        return str(found["endpoint"])

    def last_endpoint(self, role: str) -> str | None:
        """Where a process of `role` on this host listened last, though it may be gone."""
        found = self._published(role)
        return str(found["endpoint"]) if found and found["host"] == socket.gethostname() else None

    def _published(self, role: str) -> dict[str, Any] | None:
        try:
            return dict(
                json.loads((self.path / "endpoints" / f"{_plain(role)}.json").read_text(encoding="utf-8"))
            )
        except FileNotFoundError:
            return None

    def wait_endpoint(self, role: str, timeout_s: float) -> str:
        """Block until `role` has published its endpoint.

        Raises:
            PeerLost: it has not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (endpoint := self.endpoint(role)) is None:
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"the {role} published no endpoint in {self.path} within {timeout_s:g} s; "
                    f"see {self.path / 'logs' / (role + '.log')}"
                )
            time.sleep(POLL_S)
        return endpoint

    @staticmethod
    def write_json_atomic(path: Path, value: Any) -> None:
        """See `write_json_atomic` of this module."""
        write_json_atomic(path, value)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write JSON so that a reader, or a crash, sees the old file or the new one and nothing between."""
    write_bytes_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write to a neighbour, sync, rename over `path`, sync the directory.

    Raises:
        StorageError: the disk refuses; `path` is as it was.
    """
    neighbour = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with neighbour.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        neighbour.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        neighbour.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _plain(name: str) -> str:
    """`name` if it cannot leave its folder."""
    if not NAME.match(name):
        raise StorageError(
            f"a name in a run directory must be letters, digits, '.', '_' and '-', got {name!r}"
        )
    return name


def _this_process() -> dict[str, Any]:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": now}


def _describe(holder: bytes) -> str:
    try:
        found = json.loads(holder)
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
