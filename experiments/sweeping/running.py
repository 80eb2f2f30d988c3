"""Running cells: each ``tropism fit`` a process of its own, the next one when one has ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import IO

from .settings import as_yaml, overlay
from .state import State

PATIENCE_SECONDS = 20.0
LOG_LINES = 12


@dataclass
class Running:
    """A cell under way. Its log, locked, is also what keeps others off it."""

    key: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


@dataclass
class Runner:
    """Works through cells.

    Args:
        state: The sweep.
        jobs: Processes at a time; with more than one, each gets one thread.
        say: Prints a line.
        minutes: No cell is begun after so long, and those under way are stopped.
        tropism: The command; the one of this interpreter's environment.
    """

    state: State
    jobs: int
    say: Callable[[str], None]
    minutes: float | None = None
    tropism: str = str(Path(sys.executable).parent / "tropism")
    running: list[Running] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_done: int = 0
    total: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, keys: Iterable[str]) -> list[str]:
        """Run cells in this order, as far as those that they need have finished.

        Returns:
            Keys of the cells that failed, those that wait for one of them included.
        """
        waiting, began = list(keys), time.monotonic()
        self.total = len(waiting)
        self._recall_seconds()
        try:
            while True:
                if self.minutes is not None and time.monotonic() - began >= 60 * self.minutes:
                    num_left = len(waiting) + len(self.running)
                    self.say(f"{self.minutes:g} minutes are over: {num_left} cells left.")
                    return self.failed
                if not self.running or self._reap(waiting):
                    self._start_some(waiting)
                if not self.running:
                    break
                time.sleep(0.1)
        finally:
            self._stop()
            self.state.write_index()
        for key in waiting:
            self.failed.append(key)
            self.say(f"{key} not run: it needs {', '.join(self._missing(key))}, not finished.")
        return self.failed

    def _start_some(self, waiting: list[str]) -> None:
        """As many as there are jobs, the first first; takes them from ``waiting``."""
        while len(self.running) < self.jobs:
            ready = next((key for key in waiting if not self._missing(key)), None)
            if ready is None:
                return
            waiting.remove(ready)
            self._start(ready)

    def _missing(self, key: str) -> list[str]:
        """Cells that this one needs and that have not finished."""
        cell = self.state.cells[key]
        read = [other for other in cell.refers.values() if not self.state.has_run(other)]
        after = [o for o in cell.after if not (self.state.has_run(o) or self.state.has_rows(o))]
        return [*read, *after]

    def _start(self, key: str) -> None:
        folder = self.state.folder(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = (folder.parent / f"{folder.name}.log").open("ab")
        try:
            # The child inherits the lock with the log, and holds it should this process be killed.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_elsewhere = self.state.has_run(key)
        except BlockingIOError:
            is_elsewhere = True
        if is_elsewhere:
            log.close()
            self.total -= 1
            self.say(f"{key} is run by another command: left alone.")
            return
        process = subprocess.Popen(
            self._prepared(key, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({"OMP_NUM_THREADS": "1"} if self.jobs > 1 else {})},
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
        )
        self.running.append(Running(key, process, log, time.monotonic()))

    def _prepared(self, key: str, folder: Path) -> list[str]:
        """The command of a cell whose folder is ready for it: as it was, or empty."""
        cell, identity = self.state.cells[key], self.state.identities[key]
        record, last = self.state.record(key), folder / "checkpoints" / "last.ckpt"
        is_same = record.get("hash") == identity.hash and record.get("status") != "failed"
        is_resumed = is_same and last.exists()
        if not is_resumed:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            record = {"hash": identity.hash, "settings": identity.settings, "started": _now()}
        settings = cell.settings(lambda other: str(self.state.folder(other)))
        written = overlay(cell.arm.config, {**settings, "seed_everything": cell.seed})
        place = {"save_dir": str(folder.parent.parent), "name": cell.arm.name, "version": cell.name}
        written.setdefault("trainer", {})["logger"] = {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": place,
        }
        (folder / "overlay.yaml").write_text(as_yaml(written), encoding="utf-8")
        self.state.write(key, {**record, "status": "running"})
        command = [self.tropism, "fit", "--config", os.path.relpath(cell.arm.config)]
        command += ["--config", str(folder / "overlay.yaml")]
        return [*command, "--ckpt_path", str(last)] if is_resumed else command

    def _reap(self, waiting: Sequence[str]) -> bool:
        """See to the processes that have ended; whether there were any."""
        ended = [run for run in self.running if run.process.poll() is not None]
        for run in ended:
            self.running.remove(run)
            seconds = self._note(run, otherwise="failed")
            self.num_done += 1
            head = f"[{self.num_done}/{self.total}] {run.key}"
            if self.state.has_run(run.key):
                self.seconds.setdefault(self.state.cells[run.key].arm.name, []).append(seconds)
                self.say(f"{head}  {seconds:.0f} s{self._left(waiting)}")
                self.state.collect([run.key])
            else:
                self.failed.append(run.key)
                log = Path(run.log.name)
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                tail = "".join(f"\n    {line}" for line in lines[-LOG_LINES:])
                self.say(f"{head}  failed (exit code {run.process.returncode}), {log}:{tail}")
            self.state.write_index()
        return bool(ended)

    def _note(self, run: Running, otherwise: str) -> float:
        """Write down how a process ended; the seconds of all attempts of its cell."""
        run.log.close()
        record = self.state.record(run.key)
        seconds: float = record.get("seconds", 0.0) + time.monotonic() - run.began
        is_well = run.process.returncode == 0 and self.state.has_ended(run.key)
        status = "finished" if is_well else otherwise
        ending = {"status": status, "ended": _now(), "seconds": round(seconds, 1)}
        self.state.write(run.key, {**record, **ending})
        return seconds

    def _stop(self) -> None:
        """As Ctrl-C would; what has a checkpoint goes on from there next time."""
        for run in self.running:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGINT)
        last_moment = time.monotonic() + PATIENCE_SECONDS
        for run in self.running:
            try:
                run.process.wait(max(0.0, last_moment - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C again
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait()
            self._note(run, otherwise="interrupted")
        self.running.clear()

    def _recall_seconds(self) -> None:
        for key, cell in self.state.cells.items():
            if self.state.has_run(key) and (seconds := self.state.record(key).get("seconds")):
                self.seconds.setdefault(cell.arm.name, []).append(seconds)

    def _left(self, keys: Sequence[str]) -> str:
        """An estimate from what finished cells took, of the same arm where there are any."""
        if not keys and not self.running:
            return ""
        all_seconds = [s for known in self.seconds.values() for s in known]

        def expected(key: str) -> float:
            return fmean(self.seconds.get(self.state.cells[key].arm.name, all_seconds))

        under_way = [
            max(0.0, expected(run.key) - time.monotonic() + run.began) for run in self.running
        ]
        seconds = (sum(map(expected, keys)) + sum(under_way)) / self.jobs
        return f", about {timedelta(seconds=round(seconds))} left"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
