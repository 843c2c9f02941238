"""Events as files, made while they are sent: however many there are, memory holds one page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from .. import facts
from ..claims import from_us, to_us
from ..history.events import Cursor, Page
from ..history.places import Trouble
from ..keys import SEPARATOR
from ..models import LockEvent
from .asked import as_text

# More rows than this are left out: of what is older, one asks for a file of its own.
LIMIT = 100_000
COLUMNS = (
    *("at", "kind", "key", "backend", "pattern", "owner_id", "fencing_token"),
    *("host", "pid", "thread", "label", "waited", "held", "reason", "other", "metadata"),
)
# With these a spreadsheet takes a text for a formula; East Asian ones, with the wide ones too.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")

Pages = Iterable[Page]


def harmless(value: object) -> object:
    """A cell that no spreadsheet calculates: numbers are left as they are."""
    if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULA):
        return f"'{value}"
    return value


def csv_lines(pages: Pages) -> Iterator[str]:
    """A header, a line for each event, and, if it ends before they do, one that says so."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)

    def line(cells: Iterable[object]) -> None:
        writer.writerow([harmless(cell) for cell in cells])

    # By this, spreadsheets know that it is UTF-8.
    buffer.write("\ufeff")
    line(COLUMNS)
    last = None
    for page in pages:
        for event in page.events:
            cells = _cells(event)
            cells["key"] = facts.shown(event.key)
            cells["pattern"] = facts.shown(event.pattern)
            for name in ("other", "metadata"):
                cells[name] = json.dumps(cells[name], ensure_ascii=False) if cells[name] else ""
            line(cells[name] for name in COLUMNS)
        for trouble in page.troubles:
            line([incomplete(trouble)])
        last = page
        yield _emptied(buffer)
    if last is not None and last.older is not None and not last.troubles:
        text = _("There are older ones: export again, until %s.")
        line([text % as_text(_past(last.older))])
    yield _emptied(buffer)


def _emptied(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text


def json_lines(pages: Pages) -> Iterator[str]:
    """One object: the events; whether these are all; and what went wrong."""
    yield '{"events": ['
    between = ""
    last = None
    wrong: list[str] = []
    for page in pages:
        lines = []
        for event in page.events:
            cells = _cells(event)
            parts = event.key.split(SEPARATOR)
            cells["key"] = parts if len(parts) > 1 else event.key
            lines.append(between + json.dumps(cells, ensure_ascii=False))
            between = ",\n"
        wrong += [incomplete(trouble) for trouble in page.troubles]
        last = page
        yield "".join(lines)
    cut = last.older if last is not None and not wrong else None
    older = _past(cut) if cut is not None else None
    rest = {
        "complete": older is None and not wrong,
        "older_than": from_us(older).isoformat() if older else None,
        "errors": wrong,
    }
    yield f"], {json.dumps(rest, ensure_ascii=False)[1:]}\n"


FORMATS: dict[str, tuple[str, Callable[[Pages], Iterator[str]]]] = {
    "csv": ("text/csv; charset=utf-8", csv_lines),
    "json": ("application/json", json_lines),
}


def download(request: HttpRequest, extension: str, pages: Pages) -> StreamingHttpResponse:
    """The file as an answer."""
    content_type, write = FORMATS[extension]
    lines = write(pages)
    name = f"lock-history-{timezone.now():%Y-%m-%d-%H%M%S}.{extension}"
    return StreamingHttpResponse(
        _sent_by_loop(lines) if isinstance(request, ASGIRequest) else lines,
        content_type=content_type,
        headers={
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        },
    )


async def _sent_by_loop(lines: Iterator[str]) -> AsyncIterator[str]:
    """The same under ASGI, where Django would read all of it before it sends any."""
    ask = sync_to_async(lambda: next(lines, None))
    while (text := await ask()) is not None:
        yield text


def _past(last: Cursor) -> int:
    """Until when to ask for the rest: others of the last one's microsecond may be in it."""
    return last.at + 1


def incomplete(trouble: Trouble) -> str:
    """What a file says of a database that could not be read, or not to the end."""
    return _("Incomplete: the database %(database)s could not be read. %(error)s") % {
        "database": trouble.database,
        "error": trouble.error,
    }


def _cells(event: LockEvent) -> dict[str, Any]:
    cells = {name: getattr(event, name) for name in COLUMNS}
    cells["at"] = from_us(to_us(event.at.timestamp())).isoformat()
    return cells
