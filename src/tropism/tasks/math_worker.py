"""The process that runs math-verify: a line ``[gold, answer]`` in, ``1`` or ``0`` out.

Run by its path, so that it loads nothing but the standard library and math-verify. The deadline is
in CPU seconds and is the kernel's: a formula that computes inside C code ends as surely as any,
and a busy machine changes no verdict.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

READY, YES, NO = b"r", b"1", b"0"
MAX_BYTES = 4 << 30


def main(deadline: float) -> None:
    """Answer until the input ends.

    Args:
        deadline: CPU seconds that one comparison may take; then the process ends.
    """
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # parsers print there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))

    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(latex: str) -> list[object]:
        # Boxed, so that all of it is parsed: from a sentence math-verify takes what it likes.
        found: list[object] = parse(
            f"\\boxed{{{latex}}}",
            extraction_config=config,
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        return found

    os.write(replies, READY)
    for line in sys.stdin.buffer:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, deadline)  # SIGPROF, which ends the process
        is_same = verify(parsed(gold), parsed(answer), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, YES if is_same else NO)


if __name__ == "__main__":
    main(float(sys.argv[1]))
