"""The system calls that model-written code may make, as a seccomp filter.

An allow-list: reading and writing open files, opening files (Landlock and the user id say which),
memory, time, signals to itself. Whatever else, known or not yet invented, fails with EPERM: no
process or thread, no program, no socket, no signal to others, no limits, no namespaces, no ioctl.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

ALLOWED: Mapping[str, tuple[int | None, int | None]] = {
    "access": (21, None),
    "brk": (12, 214),
    "chdir": (80, 49),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fdatasync": (75, 83),
    "fstat": (5, 80),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rmdir": (84, None),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "set_robust_list": (273, 99),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, None),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Name -> its number on x86_64 and on aarch64 (None: there is no such call)."""

AUDIT_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x4000_0000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL_PROCESS, _ALLOW = 0x8000_0000, 0x7FFF_0000
_EPERM = 0x0005_0001
_OFFSET_OF_NUMBER, _OFFSET_OF_ARCHITECTURE = 0, 4


def machine() -> str | None:
    """This machine's architecture where its system call numbers are known, else None."""
    name = platform.machine()
    return name if name in AUDIT_ARCHITECTURES else None


def allowed_numbers(architecture: str) -> list[int]:
    """Numbers of the allowed system calls on ``x86_64`` or ``aarch64``."""
    place = list(AUDIT_ARCHITECTURES).index(architecture)
    return sorted(number for numbers in ALLOWED.values() if (number := numbers[place]) is not None)


def filter_program(architecture: str) -> bytes:
    """The classic BPF program: 8 bytes an instruction, for ``prctl(PR_SET_SECCOMP)``.

    A call by another architecture's convention, where the numbers mean other things, kills.
    """
    numbers = allowed_numbers(architecture)
    program = [
        (_LOAD, 0, 0, _OFFSET_OF_ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, AUDIT_ARCHITECTURES[architecture]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_OF_NUMBER),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL_PROCESS),
        *((_JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
