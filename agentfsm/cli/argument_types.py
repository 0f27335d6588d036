"""Parsers of command-line argument values, for argparse's `type=`."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from agentfsm.core.validation import COUNT, NOT_NEGATIVE, POSITIVE, SECONDS, SHARE, ValueRule
from agentfsm.ports.stored import RATING
from agentfsm.tools.schema.arguments import check_object

N = TypeVar("N", int, float)

# Maps the current time of the store to the time that an argument denotes, both in seconds since 1970.
TimeResolver = Callable[[float], float]

_UNIT_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_AGO_PATTERN: Final = re.compile(r"(\d{1,6}(?:\.\d+)?)([smhd])", re.ASCII)
_SPAN_PATTERN: Final = re.compile(r"\+(\d{1,9}(?:\.\d+)?)([smhd])", re.ASCII)
# Seconds since 1970, for 1973 to 2286. No ISO date consists of 9 or 10 digits.
_UNIX_TIME_PATTERN: Final = re.compile(r"\d{9,10}(?:\.\d+)?", re.ASCII)
# Ten years in seconds. A longer span is taken for a typing error.
MAX_SPAN_S: Final = 10 * 366 * 86_400.0
# Address of servers. Only programs on this machine can reach it.
DEFAULT_ADDRESS: Final = "127.0.0.1:8000"
MAX_PORT: Final = 65_535


def parse_time(text: str) -> TimeResolver:
    """Parse a duration from now, or a date."""
    if not text.startswith("+"):
        try:
            at = parse_date(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(
                f"{error}, or a duration from now such as +90s, +15m, +2h or +3d"
            ) from None
        return lambda _now: at
    found = _SPAN_PATTERN.fullmatch(text)
    span_s = float(found[1]) * _UNIT_SECONDS[found[2]] if found is not None else MAX_SPAN_S + 1
    if span_s > MAX_SPAN_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid duration: give at most ten years, for example +90s, +15m, +2h or +3d",
        )
    return lambda now: now + span_s


def parse_date(text: str) -> float:
    """Parse a date, in local time unless it has an offset, or seconds since 1970."""
    if _UNIX_TIME_PATTERN.fullmatch(text):
        return float(text)
    try:
        at = datetime.fromisoformat(text).timestamp()
        datetime.fromtimestamp(at).astimezone()  # raises if the time cannot be displayed
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid time: give a date such as 2026-01-31 or 2026-01-31T18:00+01:00, or seconds since "
            "1970 (9 or 10 digits)",
        ) from None
    return at


def parse_datetime(text: str) -> datetime:
    """Parse a date, which may have an offset."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid time: give a date such as 2026-01-31 or 2026-01-31T18:00+01:00"
        ) from None


def parse_since(text: str) -> float:
    """Parse a time in the past: a date, or how long ago, such as 7d, 12h or 30m."""
    if ago := _AGO_PATTERN.fullmatch(text):
        return time.time() - float(ago[1]) * _UNIT_SECONDS[ago[2]]
    try:
        return parse_date(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or how long ago, such as 7d, 12h or 30m") from None


def parse_days(text: str) -> float:
    """Parse a number of days."""
    if not re.fullmatch(r"\d{1,6}(?:\.\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of days: give a number, for example 30")
    return float(text)


def parse_new_id(text: str) -> str:
    """Parse the id of a new run."""
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} starts with '-', so commands would read it as an option: choose another id"
        )
    return text


def parse_pair(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def parse_threshold(text: str) -> tuple[str, float]:
    """Parse METRIC=NUMBER."""
    return _parse_named_number(text, example="0.8")


def parse_weight(text: str) -> tuple[str, float]:
    """Parse ARM=PERCENT."""
    return _parse_named_number(text, example="5")


def _parse_named_number(text: str, *, example: str) -> tuple[str, float]:
    name, value = parse_pair(text)
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number: write for example {name}={example}") from None


def parse_field(text: str) -> tuple[str, str]:
    """Parse a field of an answer: NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE: write for example name=Ann")
    return name, value


def parse_object(text: str) -> str:
    """Check that the text is a JSON object, and return the text."""
    if (flaw := check_object(text)) is not None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object ({flaw}): write for example '{{\"cents\": 500}}'"
        )
    return text


def parse_address(text: str) -> str:
    """Check that the text is HOST:PORT, or a port of this machine, and return the text."""
    host, port = split_address(text)
    if not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form HOST:PORT: write for example {DEFAULT_ADDRESS} or [::1]:8000"
        )
    return text


def split_address(text: str) -> tuple[str, str]:
    """Split HOST:PORT, where a single port is one of this machine."""
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else ("127.0.0.1", text)


def parse_output_file(text: str) -> str:
    """Return the path of a file that is written at the end of a command, if that is possible.

    Raises:
        ArgumentTypeError: if its folder does not exist, or the path is that of a folder.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give a file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return text


def parse_count(text: str) -> int:
    """Parse an integer of 1 or more."""
    return _parse(text, int, COUNT)


def parse_rating(text: str) -> int:
    """Parse the rating of a feedback."""
    return _parse(text, int, RATING)


def parse_seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    return _parse(text, float, SECONDS)


def parse_seconds_or_zero(text: str) -> float:
    """Parse a number of seconds, 0 or more."""
    return _parse(text, float, NOT_NEGATIVE)


def parse_share(text: str) -> float:
    """Parse a share, as 5% or 0.05."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    return _parse(number, lambda given: float(given) / (100 if is_percent else 1), SHARE)


def parse_usd(text: str) -> float:
    """Parse an amount of US dollars above 0."""
    return _parse(text, float, POSITIVE)


def parse_rate(text: str) -> tuple[int, float]:
    """Return the runs and the seconds of RUNS/SECONDS.

    Raises:
        ArgumentTypeError: if the text is something else.
    """
    runs, _, seconds = text.partition("/")
    return parse_count(runs), parse_seconds(seconds)


def _parse(text: str, convert: Callable[[str], N], rule: ValueRule) -> N:
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not rule.fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: give {rule.wanted}")
    return value
