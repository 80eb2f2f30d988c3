"""Running model-written code, with the verdict left to the caller.

    Sandbox().run(Job("def double(x): return 2 * x", "double", ("(3,)",)))
    -> Outcome(status='done', is_defined=True, results=(Value(value=6),))

Two rules. What is expected never enters the sandbox: the code is called, and what it returns comes
back as a literal, to be compared here. And it runs in a fork of a clean process that was never the
trainer, confined by Landlock, seccomp, resource limits and a user id of its own.
"""

from tropism.sandbox.pool import Sandbox, shared
from tropism.sandbox.settings import (
    Failure,
    Job,
    Limits,
    Mode,
    Outcome,
    SandboxError,
    Setting,
    Status,
    Value,
)

__all__ = [
    "Failure",
    "Job",
    "Limits",
    "Mode",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "Setting",
    "Status",
    "Value",
    "shared",
]
