r"""One answer in its many spellings: what is only look, and which number it is.

\left( 1,\ 2 \right)   (1,2)
\$1,234.00             1234
3 1/2, 3\frac{1}{2}    7/2, as are 3.5 and 3½
x = 5, Total: 5 eggs   5
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARACTERS = 500

_SPACES = re.compile(r"(?<!\\)\\[,;: ]|(?<=[^\s$])~|~(?=[A-Za-z])|\s+")  # "~6" is about 6
_WRITING = (
    (re.compile(r",\\!\s*"), ","),  # 10,\!080
    (re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))"), ""),  # 10\,080
    (re.compile(r"(?<!\\)\\!|\\left\b|\\right\b|\\displaystyle\b|\*\*|`"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"−|–(?=\d)"), "-"),
    (re.compile(r"(?<!\\)\\[()\[\]]"), ""),
    (re.compile(r"\\(?:boxed|fbox)\b"), ""),
    (re.compile(r"½"), r"\\frac{1}{2}"),
    (re.compile(r"√(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"²"), "^2"),
    (re.compile(r"³"), "^3"),
    (re.compile(r"°"), r"^\\circ "),
    (re.compile(r"·"), r"\\cdot "),
    (re.compile(r"∞"), r"\\infty "),
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_DOLLARS = re.compile(r"^\$|(?<!\\)\$$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORDS = re.compile(r"[A-Za-z]{3,}(?: ?[A-Za-z]+)*")

_NAME = re.compile(
    r"((?!(?:not|if|or|and)\b)(?:[a-z]+ (?!(?:not|or|and)\b)){0,4}[a-z]+(?:_\{?\w+\}?)?)"
    r" ?[=:](?!=) ?",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"\\frac ?(?:\{(\d+)\} ?\{(\d+)\}|(\d) ?(\d))")
_IN_ANGLES = re.compile(r"<(.+)>")  # "#### <number>", taken at its word
_NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?:US|USD|EUR|GBP)? ?[$€£¥₹]? ?(?P<inner>-?) ?"
    r"(?:(?:(?P<whole>\d+) )?(?P<top>\d+) ?/ ?(?P<bottom>\d+)"
    r"|(?P<value>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+))"
    r"(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(
    r"\(?[a-z]+\.?(?:\^?\{?[23]\}?)?\)?|/|[€£¥₹]|\^\{?\\circ\}?",
    re.IGNORECASE,
)
_NO_UNITS = {
    *(
        "or",
        "and",
        "not",
        "to",
        "if",
        "is",
        "than",
        "more",
        "less",
        "over",
        "plus",
        "minus",
        "times",
    ),
    *("x", "k", "half", "hundred", "thousand", "million", "billion", "dozen", "percent"),
}
PERCENT = re.compile(r"\\?%|\bpercent\b", re.IGNORECASE)


def written(latex: str) -> str:
    """An answer without what changes its look alone: delimiters, spacing, ``\\left``, a stop."""
    for pattern, replacement in _WRITING:
        latex = pattern.sub(replacement, latex)
    latex = _TEXT.sub(r" \1 ", latex)
    latex = _SPACES.sub(" ", latex).strip()
    latex = _DOLLARS.sub("", latex.removesuffix(".")).strip().removesuffix(".")
    return _THOUSANDS.sub("", latex)


def written_alike(one: str, other: str) -> bool:
    """Whether two answers are the same number, or the same text but for their look.

    Words (``\\text{Evelyn}``) are the same in either case, which is no matter of look in formulas.
    """
    first, second = number_of(one, can_be_percent=True), number_of(other, can_be_percent=True)
    if first is not None and second is not None:
        names = {found[1] for text in (one, other) if (found := _NAME.match(written(text)))}
        return first == second and len(names) < 2  # x=5 and y=5 are two lines
    mine, yours = _bare(one), _bare(other)
    if (_TEXT.search(one) or _TEXT.search(other)) and _WORDS.fullmatch(mine):
        return mine.casefold() == yours.casefold()
    return mine == yours


def _bare(latex: str) -> str:
    # Digits that stand apart stay so: "1 2" is not 12.
    return re.sub(r"(?<!\d) | (?!\d)", "", written(latex))


def number_of(text: str, *, can_be_percent: bool = False) -> Fraction | None:
    """The value of a text that is one plain number: "42", "$1,000.50", "18 eggs", "3 1/2", "x = 5".

    None for anything else: two numbers, a formula, "5 hundred"; and "12%", which is not 12, unless
    ``can_be_percent``.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    plain = written(text).replace("\\$", "$").strip("$ ")
    if angles := _IN_ANGLES.fullmatch(plain):
        plain = angles[1].strip()
    if name := _NAME.match(plain):
        plain = plain[name.end() :]
    found = _NUMBER.fullmatch(_FRACTION.sub(r" \1\3/\2\4 ", plain).strip())
    if found is None or (found["sign"] and found["inner"]):
        return None
    unit = found["unit"].strip().removesuffix(".")
    if can_be_percent:
        unit = PERCENT.sub("", unit).strip()
    words = unit.replace("/", " / ").replace(" ^", "^").split()
    if len(words) > 5 or not all(_UNIT.fullmatch(word) for word in words):
        return None
    if any(word.casefold().strip("().") in _NO_UNITS for word in words):
        return None
    if found["value"]:
        value = Fraction(found["value"].replace(",", ""))
    elif int(found["bottom"]):
        value = int(found["whole"] or 0) + Fraction(int(found["top"]), int(found["bottom"]))
    else:
        return None
    return -value if "-" in (found["sign"], found["inner"]) else value
