"""Time zones for tests over all of them: their changes of the clock from 2020 to 2040."""

from datetime import UTC, datetime
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

BEGIN, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)


@cache
def changes(zone: str) -> tuple[tuple[int, float], ...]:
    """The instants at which a zone's offset changes, to the second, and the offsets."""
    tz, found = ZoneInfo(zone), list[tuple[int, float]]()

    def offset(at: int) -> float:
        return datetime.fromtimestamp(at, tz).utcoffset().total_seconds()  # type: ignore[union-attr]

    first, last, day = int(BEGIN.timestamp()), int(END.timestamp()), 86_400
    found.append((first, offset(first)))
    for at in range(first, last, day):
        if offset(at + day) != offset(at):
            before, after = at, at + day
            while after - before > 1:
                middle = (before + after) // 2
                if offset(middle) == offset(at):
                    before = middle
                else:
                    after = middle
            found.append((after, offset(after)))
    return tuple(found)


@cache
def distinct() -> list[str]:
    """One zone of each set of zones that have the same offsets at all times."""
    named = available_timezones() - {"localtime"}  # what the machine is set to
    return sorted({changes(zone): zone for zone in sorted(named)}.values())
