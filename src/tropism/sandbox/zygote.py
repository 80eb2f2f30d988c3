"""The sandbox's own process: waits for jobs, forks for each, confines it, relays its reply.

Started by path as a script, with nothing of the trainer in it: it imports the standard library
only, and all of that before any job comes, as a job may be unable to read it. Its argument is one
JSON object (see ``tropism.sandbox.slot``). Over standard input come a byte ``j`` and a frame for
each job, which the job's own process reads: none sees another's. Over standard output go one
status byte and a frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import resource
import runpy
import select
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PRELOADED = """
__future__ _strptime abc argparse array base64 binascii bisect calendar cmath collections copy csv
dataclasses datetime decimal difflib doctest encodings.ascii encodings.latin_1 encodings.utf_16
enum fnmatch fractions functools glob hashlib heapq html inspect io itertools keyword locale
logging numbers operator pathlib pprint queue re secrets socket statistics string tempfile textwrap
threading timeit types typing unicodedata unittest uuid warnings weakref zlib
"""

DONE, TIMEOUT, OVERSIZED, DISK = range(4)
STARTED = b"s"
REPLY, RULES, ERRORS = 20, 21, 22  # file descriptors of a job
SECONDS_BETWEEN_LOOKS = 0.05

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
READ = 1 << 2 | 1 << 3  # files and directories
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14  # write, remove, make, truncate
LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            raise EOFError("standard input ended within a job")
        data += part
    return data


# --- confinement: irrevocable, in the job's own process -------------------------------------------


def landlock_rules(abi: int, library: str, scratch: str) -> int:
    """A file descriptor of the rules: reading below ``library``, writing below ``scratch``."""
    every_access = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("=3Q", every_access, 3, 3)[:size]  # files, TCP, signals and sockets
    rules = checked(LIBC.syscall(LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    for path, access in ((library, READ), (scratch, READ | WRITE)):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & every_access, folder)
        checked(LIBC.syscall(LANDLOCK_ADD, rules, 1, rule, 0), "landlock_add_rule")
        os.close(folder)
    return rules


def confine(config: dict[str, Any], rules: int | None) -> None:
    memory, file_size = config["memory_mb"] << 20, config["file_mb"] << 20
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, config["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, config["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (value, value))
    uid = config["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.umask(0o077)
    checked(LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "PR_SET_PDEATHSIG")
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if rules is not None:
        checked(LIBC.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
        os.close(rules)
    if config["seccomp"]:
        program = ctypes.create_string_buffer(bytes.fromhex(config["seccomp"]))
        header = struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program))
        checked(LIBC.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "PR_SET_SECCOMP")


# --- the processes --------------------------------------------------------------------------------


def job_process(
    config: dict[str, Any], run_job: Callable[..., None], rules: int | None, reply: int
) -> None:
    """The forked process, to its exit."""
    status = 1
    try:
        os.dup2(2, ERRORS)
        os.setsid()
        job = json.loads(read_exactly(0, int.from_bytes(read_exactly(0, 4), "big")))
        os.dup2(reply, REPLY)
        if rules is not None:
            rules = os.dup2(rules, RULES)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, REPLY)
        os.closerange(ERRORS + 1, 4096)
        try:
            confine(config, rules)
        except BaseException:
            os.write(ERRORS, traceback.format_exc().encode())
            raise
        os.close(ERRORS)
        os.write(REPLY, STARTED)
        run_job(job, REPLY)
        status = 0
    finally:
        os._exit(status)


def disk_use(scratch: str) -> float:
    """Bytes below ``scratch``; infinite where it is nested so deeply that it must be an attack."""
    try:
        files = [
            os.path.join(where, name) for where, _, names in os.walk(scratch) for name in names
        ]
        return sum(os.lstat(path).st_blocks * 512 for path in files)
    except FileNotFoundError:  # gone meanwhile
        return 0.0
    except (OSError, RecursionError):
        return math.inf


def collect(fd: int, buffer: bytearray, config: dict[str, Any]) -> tuple[int, int]:
    """Read a job's reply into ``buffer``; gives status and length."""
    if os.read(fd, 1) != STARTED:
        raise EOFError("a job ended before it was confined")
    length, end, quota = 0, time.monotonic() + config["wall_seconds"], 8 * config["file_mb"] << 20
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        if not poll.poll(1000 * min(left, SECONDS_BETWEEN_LOOKS)):
            if disk_use(config["scratch"]) > quota:
                return DISK, length
            continue
        count = os.readv(fd, [memoryview(buffer)[length:]])
        length += count
        if count == 0:
            return DONE, length
        if length == len(buffer):
            return OVERSIZED, length - 1
    return TIMEOUT, length


def children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # no /proc here, or a kernel without this
        return []


def end_all(pid: int, is_alone: bool) -> None:
    """Kill the job's session and whatever left it, which falls to this process; reap them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while True:
        found = children()
        for child in found:
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            if is_alone:  # in a process namespace with nobody else
                os.kill(-1, signal.SIGKILL)
        try:
            if os.waitpid(-1, 0 if found else os.WNOHANG)[0] == 0 and not is_alone:
                return
        except ChildProcessError:
            return


def clear(scratch: str) -> None:
    for entry in list(os.scandir(scratch)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def main() -> None:
    config = json.loads(sys.argv[1])
    for name in PRELOADED.split():
        importlib.import_module(name)
    runner = runpy.run_path(config["runner"])
    send = runner["send"]
    os.chdir(config["scratch"])
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")
    rules = None
    if config["landlock"]:
        library = os.path.dirname(os.__file__)
        rules = landlock_rules(config["landlock"], library, config["scratch"])
    buffer = bytearray(config["reply_bytes"] + 1)
    gc.collect()
    gc.freeze()
    send(1, b"ready")
    while os.read(0, 1) == b"j":
        reply, job_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            job_process(config, runner["run_job"], rules, job_end)
        os.close(job_end)
        try:
            status, length = collect(reply, buffer, config)
        finally:
            os.close(reply)
            end_all(pid, config["is_alone"])
        os.write(1, bytes([status]))
        send(1, bytes(buffer[:length]))
        buffer[:length] = bytes(length)  # the next job inherits this memory
        clear(config["scratch"])


if __name__ == "__main__":
    main()
