"""One zygote and its scratch directory: starts it, hands it one job at a time, replaces it."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tropism.sandbox.replies import HEADER, frame, outcome
from tropism.sandbox.settings import STATUSES, Failure, Job, Limits, Mode, Outcome, SandboxError

ZYGOTE, RUNNER = (Path(__file__).with_name(name) for name in ("zygote.py", "runner.py"))
FIRST_UID = 61_000
"""User ids of the slots where tropism runs as root; none is handed out by common tools."""
NUM_UIDS = 180
_SECONDS_TO_START = 60.0
_GRACE = 60.0
"""Seconds beyond the limit after which the zygote itself counts as stuck."""


@dataclass(frozen=True)
class Layers:
    """What confines the jobs of a slot, besides rlimits, no_new_privs and the kill at the end.

    Args:
        mode: The name of the combination.
        landlock: Version of the kernel's Landlock; 0 for none.
        seccomp: The filter program; empty for none.
        should_drop_uid: Jobs run as a user of their own.
        bubblewrap: Path of ``bwrap``, inside which the zygote runs.
    """

    mode: Mode
    landlock: int = 0
    seccomp: bytes = b""
    should_drop_uid: bool = False
    bubblewrap: str | None = None


class ZygoteError(RuntimeError):
    """The zygote ended, or is stuck.

    Attributes:
        has_complained: It left a message: the fault is ours, or the machine's.
    """

    def __init__(self, message: str, has_complained: bool) -> None:
        super().__init__(message)
        self.has_complained = has_complained


class Slot:
    """A place where one job runs at a time. Not thread-safe.

    Args:
        layers: What confines the jobs.
        limits: What one job may use.
        number: Index of the slot, which makes its user id.
        python: Interpreter that runs the jobs.
    """

    def __init__(self, layers: Layers, limits: Limits, number: int, python: str) -> None:
        self.layers, self.limits, self.python = layers, limits, python
        self.uid = FIRST_UID + number % NUM_UIDS if layers.should_drop_uid else None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._scratch: str | None = None

    def run(self, job: Job) -> Outcome:
        """Run ``job``, in a new zygote where there is none, or where the old one has died.

        Raises:
            SandboxError: No zygote starts, or it fails twice.
        """
        try:
            return self._run(job)
        except ZygoteError:
            self.close()
        try:
            return self._run(job)
        except ZygoteError as error:
            self.close()
            if self.layers.mode != "zygote" and not error.has_complained:
                # The weaker modes let a job kill its zygote, and with that its own answer.
                missing = Failure("missing")
                return Outcome("done", False, (missing,) * len(job.calls or job.statements))
            raise SandboxError(f"sandbox mode {self.layers.mode!r}: {error}") from error

    def close(self) -> None:
        """End the zygote and remove its scratch directory."""
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):
                    stream.close()
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def abandon(self) -> None:
        """Let go of the zygote without ending it: after a fork it belongs to the other process."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # else its destructor warns
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                os.close(stream.fileno())
                stream.detach()  # type: ignore[attr-defined]
        self._errors = self._scratch = None

    def _run(self, job: Job) -> Outcome:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"j" + frame(json.dumps(asdict(job)).encode()))
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        end = time.monotonic() + self.limits.wall_seconds + _GRACE
        status = self._read(1, end)[0]
        reply = self._read(int.from_bytes(self._read(HEADER, end)), end)
        return outcome(STATUSES[status], reply, job)

    def _read(self, count: int, end: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(data) < count:
            if not poll.poll(1000 * max(end - time.monotonic(), 0)):
                self._process.kill()
                raise self._failure("is stuck")
            part = os.read(fd, count - len(data))
            if not part:
                raise self._failure("ended")
            data += part
        return data

    def _failure(self, what: str) -> ZygoteError:
        assert self._errors is not None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return ZygoteError(f"the zygote {what}: {said[-2000:] or 'it left no message'}", bool(said))

    def _start(self) -> subprocess.Popen[bytes]:
        self._scratch = tempfile.mkdtemp(prefix="tropism-sandbox-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        is_wrapped = self.layers.bubblewrap is not None
        # bubblewrap is dropped to the slot's user as a whole; else each job is.
        owner = self.uid if is_wrapped else None
        dropped = {"user": owner, "group": owner, "extra_groups": []} if owner is not None else {}
        try:
            if self.uid is not None:
                os.chown(self._scratch, self.uid, self.uid)
            self._process = subprocess.Popen(
                self._command(self._scratch),
                # -I, but for one variable: the order of sets is the same in every run, so that a
                # verdict can be had again.
                env={"PYTHONHASHSEED": "0"},
                cwd=self._scratch,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                **dropped,  # type: ignore[call-overload]
            )
        except OSError as error:
            raise ZygoteError(f"the zygote does not start: {error}", True) from error
        end = time.monotonic() + _SECONDS_TO_START
        if self._read(int.from_bytes(self._read(HEADER, end)), end) != b"ready":
            raise self._failure("is not ready")
        return self._process

    def _command(self, scratch: str) -> list[str]:
        is_wrapped = self.layers.bubblewrap is not None
        config: Mapping[str, Any] = {
            **asdict(self.limits),
            "uid": None if is_wrapped else self.uid,
            "landlock": self.layers.landlock,
            "seccomp": self.layers.seccomp.hex(),
            "runner": str(RUNNER),
            "scratch": scratch,
            "is_alone": is_wrapped,
        }
        command = [self.python, "-s", "-P", "-S", "-B", str(ZYGOTE), json.dumps(config)]
        if self.layers.bubblewrap is None:
            return command
        return [*_wrapping(self.layers.bubblewrap, self.python, scratch), *command]


def _wrapping(bubblewrap: str, python: str, scratch: str) -> Sequence[str]:
    """bubblewrap's part of the command: every namespace new, and nothing of the host but code."""
    system = ("/usr", "/bin", "/lib", "/lib64")
    prefix = str(Path(python).resolve().parents[1])
    shown = [*system, *([] if prefix.startswith("/usr") else [prefix])]
    return [
        bubblewrap,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--new-session"),
        *("--cap-drop", "ALL", "--dev-bind", "/dev/null", "/dev/null"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),
        *(word for path in (ZYGOTE, RUNNER) for word in ("--ro-bind", str(path), str(path))),
        # The root is a file system in memory: nothing may be left there.
        *("--bind", scratch, scratch, "--remount-ro", "/", "--chdir", scratch),
        "--",
    ]


def interpreter() -> str:
    """The interpreter behind this one, out of any virtual environment."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
