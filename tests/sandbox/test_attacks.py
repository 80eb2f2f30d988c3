"""Attacks by model-written code, as root and not, each beside a plain process that lets it through.

An attack is a function ``attack(target)`` that gives proof of success; where the damage can be seen
from outside, that is looked at instead.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tropism.sandbox import Job, Limits, Outcome, Sandbox, Value
from tropism.sandbox.probe import layers_of
from tropism.sandbox.slot import ZygoteError

NOBODY = 65_534
SYSTEM_PYTHON = "/usr/bin/python3"
LIMITS = Limits(cpu_seconds=1, wall_seconds=2.5)

ATTACKS = {
    "fork_bomb": """
import os, time
def attack(target):
    made = 0
    for _ in range(target):
        try:
            if os.fork() == 0:
                time.sleep(0.5)
                os._exit(0)
        except OSError:
            break
        made += 1
    return made > 0
""",
    "run_program": """
import os
def attack(target):
    return os.waitpid(os.posix_spawn(target, [target], {}), 0)[1] == 0
""",
    "read_host_file": """
def attack(target):
    with open(target) as file:
        return file.read() == "secret"
""",
    "write_host_file": """
def attack(target):
    with open(target, "w") as file:
        file.write("x")
    return True
""",
    "tcp": """
import socket
def attack(target):
    socket.socket().connect(("127.0.0.1", target))
    return True
""",
    "udp": """
import socket
def attack(target):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", target))
    return True
""",
    "unix_socket": """
import socket
def attack(target):
    socket.socket(socket.AF_UNIX).connect(target)
    return True
""",
    "allocation": """
def attack(target):
    return len(bytes(target)) == target
""",
    "loop_ignoring_signals": """
import signal
def attack(target):
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    print("ready", flush=True)
    while True:
        pass
""",
    "orphan_daemon": """
import os, time
def attack(target):
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 3)
            time.sleep(20)
        os._exit(0)
    return int(os.read(read, 20))
""",
    "parent_environment": """
def attack(target):
    with open(f"/proc/{target}/environ", "rb") as file:
        return len(file.read()) > 0
""",
    "ptrace": """
import ctypes, os
def attack(target):
    libc = ctypes.CDLL(None)
    if libc.ptrace(16, target, 0, 0) != 0:
        return False
    os.waitpid(target, 0)
    return libc.ptrace(17, target, 0, 0) == 0
""",
    "process_memory": """
def attack(target):
    with open(f"/proc/{target}/mem", "rb"):
        return True
""",
    "kill_process": """
import os
def attack(target):
    os.kill(target, 9)
    return True
""",
    "fill_disk": """
import os
def attack(target):
    block = b"x" * (1 << 20)
    for number in range(target // 8):
        with open(f"file{number}", "wb") as file:
            for _ in range(8):
                file.write(block)
    return True
""",
    "user_namespace": """
import ctypes
def attack(target):
    return ctypes.CDLL(None).unshare(0x10000000) == 0
""",
    "raise_rlimits": """
import resource
def attack(target):
    resource.setrlimit(resource.RLIMIT_AS, (target, target))
    return True
""",
}


@dataclass
class Host:
    """What the attacks are aimed at, on the machine outside of the sandbox."""

    folder: Path
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    victim: subprocess.Popen[bytes]

    def target(self, name: str, *, is_bounded: bool) -> Any:
        """What ``attack`` gets; with ``is_bounded`` the machine survives its success."""
        return {
            "fork_bomb": 20 if is_bounded else 100_000,
            "run_program": shutil.which("true"),
            "read_host_file": str(self.folder / "secret.txt"),
            "write_host_file": str(self.folder / "written.txt"),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix_socket": str(self.folder / "s"),
            "allocation": 600_000_000 if is_bounded else 1_500_000_000,
            "fill_disk": 96 if is_bounded else 4096,
            "raise_rlimits": 2**40,
        }.get(name, self.victim.pid)

    def is_damaged(self, name: str, outcome: Any) -> bool:
        """Whether the attack worked: by what is seen outside, else by its own proof."""
        if name == "write_host_file":
            return (self.folder / "written.txt").exists()
        if name == "udp":
            with suppress(BlockingIOError):
                return self.udp.recv(10) == b"x"
            return False
        if name == "kill_process":
            time.sleep(0.05)
            return self.victim.poll() is not None
        if name == "orphan_daemon":
            return isinstance(outcome, int) and Path(f"/proc/{outcome}").exists()
        return outcome is True


def make_host(folder: Path, uid: int | None) -> Host:
    folder.mkdir()
    (folder / "secret.txt").write_text("secret")
    folder.chmod(0o777)
    tcp = socket.create_server(("127.0.0.1", 0), backlog=16)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    udp.setblocking(False)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "s"))
    unix.listen(16)
    (folder / "s").chmod(0o777)
    user = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    victim = subprocess.Popen(["sleep", "600"], **user)  # type: ignore[call-overload]
    return Host(folder, tcp, udp, unix, victim)


@pytest.fixture
def host() -> Iterator[Host]:
    # Not tmp_path: pytest keeps others out of that, which would stop some attacks by itself.
    folder = Path(f"/tmp/tropism-attacks-{os.getpid()}-{time.monotonic_ns()}")
    found = make_host(folder, None)
    yield found
    end_host(found)


def end_host(host: Host) -> None:
    for part in (host.tcp, host.udp, host.unix):
        part.close()
    host.victim.kill()
    host.victim.wait()
    shutil.rmtree(host.folder)


def sandbox_of(mode: str) -> Sandbox:
    """A sandbox of one mode, or a skip that says what is missing here."""
    is_root = os.geteuid() == 0
    try:
        layers = layers_of(mode)  # type: ignore[arg-type]
    except ZygoteError as error:
        pytest.skip(f"{mode}: {error}")
    # A Python below a home of mode 0700 cannot be started by another user.
    python = SYSTEM_PYTHON if mode == "bubblewrap" and is_root else None
    return Sandbox(limits=LIMITS, num_slots=1, layers=layers, python=python)


@pytest.fixture(scope="module", params=["zygote", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    found = sandbox_of(request.param)
    yield found
    found.close()


def strike(sandbox: Sandbox, host: Host, name: str) -> tuple[Any, Outcome]:
    target = host.target(name, is_bounded=False)
    outcome = sandbox.run(Job(ATTACKS[name], "attack", (repr((target,)),)))
    (result,) = outcome.results
    return (result.value if isinstance(result, Value) else None), outcome


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, sandbox: Sandbox, host: Host) -> None:
    """As the user who runs the tests."""
    start = time.monotonic()
    value, outcome = strike(sandbox, host, name)
    assert outcome.is_defined, "the attack did not even begin"
    assert not host.is_damaged(name, value)
    assert time.monotonic() - start < 3 * LIMITS.wall_seconds
    # And the sandbox still works.
    assert sandbox.run(Job("def f(x): return x + 1", "f", ("(1,)",))).results == (Value(2),)


UNPRIVILEGED = """
import importlib.util, json, os, pathlib, sys
spec = importlib.util.spec_from_file_location("attacks", sys.argv[1])
attacks = importlib.util.module_from_spec(spec)
sys.modules["attacks"] = attacks
spec.loader.exec_module(attacks)
import concurrent.futures.thread, tempfile, unittest.mock
os.setgroups([]); os.setgid(attacks.NOBODY); os.setuid(attacks.NOBODY)
mode, folder = sys.argv[2], pathlib.Path(sys.argv[3])
layers = attacks.layers_of(mode)
sandbox = attacks.Sandbox(
    limits=attacks.LIMITS, num_slots=1, layers=layers, python=attacks.SYSTEM_PYTHON
)
assert not layers.should_drop_uid
found = {}
for name in attacks.ATTACKS:
    host = attacks.make_host(folder / name, None)
    value, outcome = attacks.strike(sandbox, host, name)
    found[name] = [outcome.is_defined, host.is_damaged(name, value)]
    attacks.end_host(host)
sandbox.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["zygote", "bubblewrap"])
def unprivileged(request: pytest.FixtureRequest) -> dict[str, list[bool]]:
    """Attack -> (it began, it worked), by a process that drops from root to a user before."""
    if os.geteuid() != 0:
        pytest.skip("the tests do not run as root: test_attack has done this")
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"needs {SYSTEM_PYTHON}, which every user may run")
    sandbox_of(request.param).close()
    folder = Path(f"/tmp/tropism-unprivileged-{os.getpid()}-{request.param}")
    folder.mkdir()
    folder.chmod(0o777)
    command = [sys.executable, "-c", UNPRIVILEGED, __file__, request.param, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_unprivileged(name: str, unprivileged: dict[str, list[bool]]) -> None:
    assert unprivileged[name] == [True, False]


def plain(name: str, host: Host) -> subprocess.Popen[bytes]:
    """The attack in an ordinary process, which is what many harnesses use."""
    code = f"{ATTACKS[name]}\nprint(repr(attack({host.target(name, is_bounded=True)!r})))"
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code], cwd=host.folder, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "loop_ignoring_signals"])
def test_a_plain_process_lets_it_through(name: str, host: Host) -> None:
    process = plain(name, host)
    said, _ = process.communicate(timeout=60)
    value = eval(said)
    assert host.is_damaged(name, value)
    if name == "orphan_daemon":
        os.kill(value, 9)


def test_a_plain_process_that_ignores_signals_goes_on(host: Host) -> None:
    process = plain("loop_ignoring_signals", host)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.kill()  # a time-out does stop this one, and only this one
    process.communicate()


def test_there_are_seventeen() -> None:
    assert len(ATTACKS) == 17


def test_attacks_stop_for_the_reason_meant(host: Host) -> None:
    """Each is refused by name, so that none fails of a mistake in itself."""
    sandbox = sandbox_of("zygote")
    seen: dict[str, Callable[[Outcome], bool]] = {
        "read_host_file": lambda o: o.results[0].reason == "PermissionError",  # type: ignore[union-attr]
        "tcp": lambda o: o.results[0].reason == "PermissionError",  # type: ignore[union-attr]
        "allocation": lambda o: o.results[0].reason == "MemoryError",  # type: ignore[union-attr]
        "raise_rlimits": lambda o: "Error" in o.results[0].reason,  # type: ignore[union-attr]
        "user_namespace": lambda o: o.results == (Value(False),),
        "ptrace": lambda o: o.results == (Value(False),),
        "fill_disk": lambda o: o.status == "disk",
    }
    for name, is_meant in seen.items():
        _, outcome = strike(sandbox, host, name)
        assert is_meant(outcome), (name, outcome)
    sandbox.close()
