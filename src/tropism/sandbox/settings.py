"""What a sandbox is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Setting = Literal["auto", "rlimits"]
Mode = Literal["zygote", "bubblewrap", "rlimits"]
Status = Literal["done", "timeout", "oversized", "disk"]
STATUSES: tuple[Status, ...] = get_args(Status)


class SandboxError(RuntimeError):
    """The sandbox itself failed, or none can be had here; never the fault of what it runs."""


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Args:
        cpu_seconds: Processor time.
        wall_seconds: Time on the clock, longer than ``cpu_seconds`` so that a busy machine changes
            no verdict.
        memory_mb: Address space.
        file_mb: Size of one file; eight times that of all of them.
        open_files: File descriptors.
        reply_bytes: Size of all values that are returned, written out.

    Raises:
        ValueError: A limit that is not positive.
    """

    cpu_seconds: int = 3
    wall_seconds: float = 6.0
    memory_mb: int = 512
    file_mb: int = 8
    open_files: int = 32
    reply_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value}: give a positive limit.")


@dataclass(frozen=True)
class Job:
    """Code, and the calls to make of one function that it defines.

    Args:
        code: Python source, not trusted.
        function: Name of the function.
        calls: The positional arguments of each call, as the literal of a tuple.
        statements: Run one by one after the code, instead of calls. Whoever wrote the code can
            make them seem to succeed.
    """

    code: str
    function: str
    calls: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """What a call returned, made of Python's literal types."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """Why a call returned nothing that can be compared: an exception's name, as the code says."""

    reason: str


@dataclass(frozen=True)
class Outcome:
    """What came back of a job. All of it may be invented by the code that ran.

    Args:
        status: How the run ended: ``done`` by itself, or stopped for ``timeout``, ``oversized``
            (its reply) or ``disk``.
        is_defined: The code ran through and defined the function.
        results: One for each call or statement, in order; `Failure("missing")` where none came.
    """

    status: Status
    is_defined: bool
    results: tuple[Value | Failure, ...]
