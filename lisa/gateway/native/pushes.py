"""`/v1/topics/{topic}/push`: where a topic's messages are pushed."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from lisa.admin import push as admin
from lisa.core.errors import ConfigError
from lisa.core.keys import check_group
from lisa.gateway.access import Scope
from lisa.gateway.native.models import NoFields
from lisa.gateway.native.operations import Call, Operation, answer
from lisa.gateway.problems import Problem
from lisa.gateway.push import allowed_of, look_now
from lisa.gateway.push.allowed import NotAllowed

__all__ = ["operations"]

PATH = "/v1/topics/{topic}/push"
Group = Annotated[str, Meta(pattern="^[A-Za-z0-9_.:-]{1,128}$")]


class PushRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Where to push, signed with what.

    Without `secret` a target keeps the one that it has; a new one gets a fresh one.
    """

    url: Annotated[str, Meta(min_length=1, max_length=admin.MOST_URL)]
    group: Group | None = None
    concurrency: Annotated[int, Meta(ge=1, le=admin.MOST_CONCURRENCY)] | None = None
    timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000)] | None = None
    secret: str | None = None
    renew_secret: bool = False


class PushTarget(msgspec.Struct):
    """A target; null is what the gateway's configuration says."""

    group: str
    url: str
    concurrency: int | None
    timeout_ms: int | None


class PushAnswer(PushTarget):
    """The same, with its `secret` if that was made just now: it is told this once."""

    secret: str | UnsetType = UNSET


class PushTargets(msgspec.Struct):
    """All targets of a topic."""

    targets: list[PushTarget]


class PushRemoved(msgspec.Struct):
    """The groups that are pushed no more."""

    removed: list[str]


class PushQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which group; without it all of them."""

    group: Group | None = None


def operations() -> list[Operation]:
    """What the table gets."""
    return [
        Operation(
            name="listPushTargets", method="GET", path=PATH, group="Pushes",
            summary="Where a topic is pushed", scope=Scope.OPERATE, handler=_show,
            answers={200: (PushTargets, "The target of each group that has one.")},
        ),
        Operation(
            name="setPushTarget", method="PUT", path=PATH, group="Pushes",
            summary="Push a group's messages to a URL", scope=Scope.OPERATE, handler=_put,
            description="Each delivery is POSTed there, signed by the scheme of Standard Webhooks. "
            "Without `group` the topic's only one, which is declared if there is none.",
            body=PushRequest,
            answers={
                201: (PushAnswer, "The group was pushed nowhere before."),
                200: (PushAnswer, "It is pushed there from now on."),
            },
        ),
        Operation(
            name="removePushTarget", method="DELETE", path=PATH, group="Pushes",
            summary="Push no more", scope=Scope.OPERATE, handler=_delete, query=PushQuery,
            answers={
                200: (PushRemoved, "What is posted finishes, the rest waits for other consumers."),
            },
            problems={404: "It is pushed nowhere."},
        ),
    ]  # fmt: skip


async def _show(call: Call[NoFields, None]) -> Response:
    store = call.hub.store
    found = await store.drive(admin.targets(store, call.topic))
    return answer(PushTargets([
        PushTarget(one.group, one.url, one.concurrency, one.timeout_ms) for one in found
    ]))  # fmt: skip


async def _put(call: Call[NoFields, PushRequest]) -> Response:
    store, wanted = call.hub.store, call.body
    _check_host(call, wanted.url)
    timeout_ms = wanted.timeout_ms
    placed = await store.drive(
        admin.place(
            store, call.topic, wanted.url, group=wanted.group, concurrency=wanted.concurrency,
            timeout=None if timeout_ms is None else timedelta(milliseconds=timeout_ms),
            secret=wanted.secret, renew_secret=wanted.renew_secret,
        )
    )  # fmt: skip
    await look_now(call.hub, call.topic)
    one = placed.target
    shown = PushAnswer(
        one.group, one.url, one.concurrency, one.timeout_ms,
        one.secret if placed.is_new_secret else UNSET,
    )  # fmt: skip
    return answer(shown, 201 if placed.is_new else 200)


def _check_host(call: Call[NoFields, PushRequest], url: str) -> None:
    """Refuse what can never be pushed to; a name is judged when it is connected to."""
    try:
        allowed_of(call.hub).check_literal(urlsplit(url).hostname or "")
    except NotAllowed as error:
        raise Problem(400, "refused", str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{url[:80]!r} is no URL: {error}") from None


async def _delete(call: Call[PushQuery, None]) -> Response:
    store, group = call.hub.store, call.query.group
    if group is not None:
        check_group(group)
    gone = await store.drive(admin.remove(store, call.topic, group))
    await look_now(call.hub, call.topic)
    if not gone:
        of = f"group {group!r} of topic" if group else "topic"
        raise Problem(404, "unknown-push", f"{of} {call.topic!r} is not pushed anywhere")
    return answer(PushRemoved(gone))
