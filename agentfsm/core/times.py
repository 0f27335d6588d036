"""Times as a journal keeps them: as text, a tenth of a turn's bytes on disk would else be digits that say nothing."""


def round_timestamp(seconds: float) -> float:
    """Return a date, in seconds since 1970, in whole milliseconds."""
    return int(seconds * 1e3 + 0.5) / 1e3


def round_duration(seconds: float) -> float:
    """Return a duration, in seconds, in whole microseconds."""
    return int(seconds * 1e6 + 0.5) / 1e6
