"""Versions of prompts, in the order of semantic versioning: 10.0 is above 2.0, and 1.0.0-rc.1 is below 1.0.0."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from agentfsm.core.errors import MisuseError

_VERSION: Final = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,2})(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?", re.ASCII)
VERSION_EXAMPLES: Final = "'1.4.0', '2.0' or '2.0.0-rc.1'"

# Sorts as the version does: the numbers, whether it is a release, and the parts of the pre-release.
VersionKey: TypeAlias = tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]


def is_version(text: str) -> bool:
    """Return whether the text is a version, with or without a leading "v"."""
    return _VERSION.fullmatch(text) is not None


def version_key(text: str) -> VersionKey:
    """Return the sort key of a version. Equal versions, such as "1.0" and "v1.0.0", have equal keys.

    Raises:
        MisuseError: if the text is not a version.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise MisuseError(f"version {text[:50]!r}: give one such as {VERSION_EXAMPLES}")
    numbers = [int(number) for number in found[1].split(".")]
    before = found[2].split(".") if found[2] else []
    parts = tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in before)
    return (*numbers, *[0] * (3 - len(numbers))), not before, parts
