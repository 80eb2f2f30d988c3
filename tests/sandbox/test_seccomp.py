"""The filter, run by a small machine of our own on both architectures."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tropism.sandbox.seccomp import ALLOWED, AUDIT_ARCHITECTURES, allowed_numbers, filter_program

ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
X86_64, AARCH64 = (AUDIT_ARCHITECTURES[name] for name in ("x86_64", "aarch64"))
DANGEROUS = {
    "x86_64": {
        **{"socket": 41, "connect": 42, "clone": 56, "fork": 57, "vfork": 58, "execve": 59},
        **{"kill": 62, "ptrace": 101, "setrlimit": 160, "mount": 165, "unshare": 272},
        **{"prlimit64": 302, "setns": 308, "process_vm_writev": 311, "bpf": 321, "execveat": 322},
        **{"tgkill": 234, "io_uring_setup": 425, "clone3": 435, "ioctl": 16, "prctl": 157},
    },
    "aarch64": {
        **{"socket": 198, "connect": 203, "clone": 220, "execve": 221, "kill": 129, "ptrace": 117},
        **{"setrlimit": 164, "mount": 40, "unshare": 97, "prlimit64": 261, "setns": 268},
        **{"process_vm_writev": 271, "bpf": 280, "execveat": 281, "io_uring_setup": 425},
        **{"clone3": 435, "tgkill": 131, "ioctl": 29, "prctl": 167},
    },
}


def judge(program: bytes, architecture: int, number: int) -> int:
    """What the kernel would answer: the few instructions of classic BPF that the filter has."""
    data, accumulator, place = struct.pack("=II", number, architecture), 0, 0
    instructions = list(struct.iter_unpack("=HBBI", program))
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = accumulator == value if code == 0x15 else accumulator >= value
            place += if_true if holds else if_false


@pytest.mark.parametrize("name", AUDIT_ARCHITECTURES)
def test_exactly_the_list_is_allowed(name: str) -> None:
    program, audit = filter_program(name), AUDIT_ARCHITECTURES[name]
    verdicts = {number: judge(program, audit, number) for number in range(600)}
    allowed = [number for number, verdict in verdicts.items() if verdict == ALLOW]
    assert allowed == allowed_numbers(name)
    assert {v for n, v in verdicts.items() if n not in allowed} == {EPERM}
    for call, number in DANGEROUS[name].items():
        assert verdicts[number] == EPERM, call


def test_foreign_conventions_kill() -> None:
    i386 = 0x40000003
    assert judge(filter_program("x86_64"), i386, 1) == KILL
    assert judge(filter_program("x86_64"), AARCH64, 63) == KILL
    assert judge(filter_program("aarch64"), X86_64, 0) == KILL
    assert judge(filter_program("x86_64"), X86_64, 0x40000000 | 0) == KILL  # x32's read


@pytest.mark.parametrize(
    ("place", "header"),
    [
        (0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        (1, "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(place: int, header: str) -> None:
    path = Path(header)
    if not path.exists():
        pytest.skip(f"needs {header} (linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    numbers = {name: int(number) for name, number in found}
    numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat", -1))
    assert {name: n[place] for name, n in ALLOWED.items()} == {
        name: numbers.get(name) for name in ALLOWED
    }
