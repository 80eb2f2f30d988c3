"""Which sandbox this machine offers: tried out, not assumed.

Strongest first: Landlock and seccomp around each job; else bubblewrap around the zygote; else
rlimits alone, which no user gets without asking for it. Each is started and has to stop what it
must stop before it is chosen.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence

from tropism.sandbox import seccomp
from tropism.sandbox.settings import Job, Limits, Mode, SandboxError, Setting, Value
from tropism.sandbox.slot import Layers, Slot, ZygoteError

_SELF_TEST = """
import os, socket

def stopped(attack):
    try:
        attack()
    except (OSError, PermissionError):
        return True
    return False

def write(path):
    with open(path, "w") as file:
        file.write("x")

def host():
    return stopped(lambda: os.listdir("/etc")) and stopped(lambda: write("/tmp/tropism-escape"))

def network():
    def attack():
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", 9))
    return stopped(attack)

def sockets():
    return stopped(lambda: socket.socket(socket.AF_UNIX).close())

def user():
    return os.getuid() != 0

def process():
    def attack():
        if os.fork() == 0:
            os._exit(0)
    return stopped(attack)

def scratch():
    write("own.txt")
    return os.listdir(".") == ["own.txt"]

def check(name):
    return globals()[name]()
"""
_MUST_HOLD: Mapping[Mode, Sequence[str]] = {
    "zygote": ("scratch", "user", "host", "network", "sockets", "process"),
    "bubblewrap": ("scratch", "user", "host", "network", "process"),
    "rlimits": ("scratch", "user"),
}
REMEDIES = (
    "Run on Linux 5.13 or newer with Landlock (it may have to be named in the kernel's lsm= list) "
    "and seccomp allowed, or install bubblewrap with user namespaces allowed"
)


def landlock_version() -> int:
    """Version of the kernel's Landlock, 0 where it has none or does not offer it."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return max(int(syscall(444, None, 0, 1)), 0) if seccomp.machine() else 0


def layers_of(mode: Mode) -> Layers:
    """The layers of a mode on this machine.

    Raises:
        ZygoteError: Something that the mode needs is missing; the message names it.
    """
    machine, landlock, is_root = seccomp.machine(), landlock_version(), os.geteuid() == 0
    program = seccomp.filter_program(machine) if machine else b""
    if mode == "zygote":
        if machine is None:
            raise ZygoteError("system call numbers of this machine are unknown", True)
        if not landlock:
            raise ZygoteError("the kernel offers no Landlock", True)
        return Layers(mode, landlock, program, is_root)
    if mode == "bubblewrap":
        path = shutil.which("bwrap")
        if path is None:
            raise ZygoteError("bwrap is not installed", True)
        return Layers(mode, should_drop_uid=is_root, bubblewrap=path)
    return Layers(mode, should_drop_uid=is_root)


def choose(
    setting: Setting,
    python: str,
    layers_for: Callable[[Mode], Layers] = layers_of,
) -> Layers:
    """The strongest layers that hold here.

    Raises:
        SandboxError: None holds, and the setting does not allow to do without.
    """
    reasons: dict[Mode, str] = {}
    for mode in ("zygote", "bubblewrap", "rlimits"):
        if mode == "rlimits" and setting != "rlimits":
            continue
        try:
            layers = layers_for(mode)
            reasons[mode] = _fault(layers, python)
        except ZygoteError as error:
            reasons[mode] = str(error)
            continue
        if reasons[mode]:
            continue
        if mode == "rlimits":
            warnings.warn(
                "sandbox='rlimits': MODEL-WRITTEN CODE RUNS WITH NOTHING BUT RESOURCE LIMITS. It "
                "can read your files, open connections and, where tropism does not run as root, "
                f"write and delete them. {REMEDIES}. Missing here: {_listed(reasons)}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return layers
    raise SandboxError(
        f"sandbox={setting!r}: no sandbox that holds can be had here ({_listed(reasons)}). "
        f"{REMEDIES}. To run model-written code with resource limits alone, at your own risk, set "
        "sandbox='rlimits'."
    )


def _fault(layers: Layers, python: str) -> str:
    """What of the self-test fails under ``layers``; empty where all holds."""
    slot = Slot(layers, Limits(), 0, python)
    names = _MUST_HOLD[layers.mode]
    try:
        found = slot.run(Job(_SELF_TEST, "check", tuple(repr((name,)) for name in names)))
    except SandboxError as error:
        return str(error)
    finally:
        slot.close()
    failed = [n for n, r in zip(names, found.results, strict=True) if r != Value(True)]
    return f"in mode {layers.mode!r} these do not hold: {failed}" if failed else ""


def _listed(reasons: Mapping[Mode, str]) -> str:
    return "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items() if reason)
