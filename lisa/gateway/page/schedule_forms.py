"""The form that creates or edits a schedule: from a definition to its fields, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from lisa.core.model.clock import ms_datetime, zone_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.late import late_text
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    CatchUp,
    Dst,
    Overlap,
    ScheduleDefinition,
    body_of,
)
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.store import schedule_reads
from lisa.gateway.access import Scope
from lisa.gateway.page.resending import MOST_EDITED, edited_body
from lisa.gateway.page.schedules import known
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.view_context import PageRequest
from lisa.gateway.problems import ErrorResponse

NO_RETRIES = "none"
TEXTS = ("cron", "every", "tz", "start", "until", "jitter", "max_late", "ttl", "late")
"""Fields that a schedule takes as text; empty ones are unset."""

_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s"), (1, "ms"))
_headers_decoder = msgspec.json.Decoder(dict[str, str])


async def show(visit: PageRequest) -> Response:
    """The form: of a schedule if the address names one, else of a new one."""
    topic = (await require_topic(visit)).topic
    visit.require_actions()
    visit.token.require(Scope.PRODUCE, topic)
    name = visit.query.get("name", "")
    if not name:
        return page(visit, topic, {"version": "0", **fields_of(ScheduleDefinition())})
    store = visit.hub.store
    record = known(await store.drive(schedule_reads.get_record(store, topic, name)), topic, name)
    fields = {"schedule": name, "version": str(record.version), **fields_of(record.definition)}
    return page(visit, topic, fields)


def page(
    visit: PageRequest, topic: str, fields: Mapping[str, str], fault: ErrorResponse | None = None
) -> Response:
    """The form with some values. fault: why the last attempt changed nothing."""
    return visit.page(
        "schedule_form.html",
        fault.status if fault else 200,
        topic=topic,
        fields=fields,
        fault=fault.detail if fault else "",
        is_new=fields.get("version") == "0",
        choices={"dst": list(Dst), "overlap": list(Overlap), "catch_up": list(CatchUp)},
        most_caught_up=MOST_CAUGHT_UP,
    )


def fields_of(defined: ScheduleDefinition) -> dict[str, str]:
    """The values of the form's fields; without those that a form cannot hold."""
    zone = zone_of(defined.tz)

    def instant(ms: int | None) -> str:
        return "" if ms is None else ms_datetime(ms).astimezone(zone).isoformat()

    return {
        "cron": defined.cron,
        "every": exact_duration(defined.every_ms),
        "tz": defined.tz,
        "dst": defined.dst,
        "start": instant(defined.start_ms),
        "until": instant(defined.until_ms),
        "count": "" if defined.most is None else str(defined.most),
        "jitter": exact_duration(defined.jitter_ms),
        "catch_up": defined.catch_up,
        "max": str(defined.max_caught_up),
        "max_late": exact_duration(defined.max_late_ms),
        "overlap": defined.overlap,
        "template": "yes" if defined.template else "",
        "headers": msgspec.json.encode(defined.headers).decode() if defined.headers else "",
        "ttl": exact_duration(defined.ttl_ms),
        "retry": _retry_text(defined.policy),
        "late": late_text(defined.late) or "",
        **_body_fields(defined.kind, defined.body),
    }


def _body_fields(kind: str, body: str) -> dict[str, str]:
    if kind == "b" or len(body.encode("utf-8", "replace")) > MOST_EDITED:
        return {}
    if kind == "j":
        indented = msgspec.json.format(body.encode(), indent=2).decode()
        body = indented if len(indented) <= MOST_EDITED else body
    return {"kind": kind, "body": body}


def options_of(fields: Mapping[str, str], stored: ScheduleDefinition | None) -> dict[str, Any]:
    """The options of `Producer.schedule` for a form; `stored` provides a body that it leaves out.

    Raises InvalidMessage.
    """
    given: dict[str, Any] = {name: fields.get(name, "").strip() or None for name in TEXTS}
    catch_up = fields.get("catch_up") or CatchUp.ONE
    if catch_up == CatchUp.ALL:
        catch_up = f"all(max={fields.get('max') or MOST_CAUGHT_UP})"
    return {
        **given,
        "dst": fields.get("dst") or Dst.VIXIE,
        "count": _number("count", fields.get("count", "")),
        "catch_up": catch_up,
        "overlap": fields.get("overlap") or Overlap.ALLOW,
        "template": fields.get("template") == "yes",
        "headers": _headers(fields.get("headers", "")),
        "retry": _retry(fields.get("retry", "").strip()),
        "body": _body(fields, stored),
    }


def version_of(fields: Mapping[str, str]) -> int:
    """The version that the form was filled from; 0 for a new schedule. Raises InvalidMessage."""
    version = _number("version", fields.get("version", ""))
    if version is None:
        raise InvalidMessage("the form has no version: reload the page")
    return version


def exact_duration(ms: int | None) -> str:
    """A duration as one number with the largest unit that expresses it exactly; empty for none."""
    if not ms:
        return ""
    size, unit = next(one for one in _UNITS if ms % one[0] == 0)
    return f"{ms // size}{unit}"


def _retry_text(policy: str | None) -> str:
    if policy is None:
        return ""
    decoded = RetryPolicy.decode(policy)
    delays = ",".join(exact_duration(one) or "0" for one in decoded.delays_ms)
    return (f"{delays}~{decoded.jitter!r}" if decoded.jitter else delays) or NO_RETRIES


def _retry(text: str) -> str | None:
    if not text:
        return None
    return "" if text == NO_RETRIES else text


def _number(name: str, text: str) -> int | None:
    text = text.strip()
    if text and not (text.isdecimal() and text.isascii() and len(text) <= 12):
        raise InvalidMessage(f"{name} is a number, not {text!r}")
    return int(text) if text else None


def _headers(text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    try:
        return _headers_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidMessage(
            f'the headers are a JSON object with text values, as in {{"source": "shop"}}: {error}'
        ) from None


def _body(fields: Mapping[str, str], stored: ScheduleDefinition | None) -> Any:
    if "body" in fields:
        return edited_body(fields.get("kind", "j"), fields["body"])
    if stored is None:
        raise InvalidMessage("the form has no body")
    return msgspec.Raw(stored.encoded_body) if stored.kind == "j" else body_of(stored)
