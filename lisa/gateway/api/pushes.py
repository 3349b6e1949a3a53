"""`/v1/topics/{topic}/push`: models and handlers for a topic's push targets."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import UNSET, Meta, UnsetType, convert

from lisa.admin import push as admin
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_group
from lisa.gateway.access import Scope
from lisa.gateway.api.operations import NO_TOPIC, TOPIC, Call, Operations, Reply, answer
from lisa.gateway.api.topics import require_topic
from lisa.gateway.api.types import Answer, Name, NoFields, PushTimeout, Request
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.push import allowed_of, reload_targets
from lisa.gateway.push.network import NotAllowed

PATH = f"{TOPIC}/push"

operations = Operations("Pushes")


class PushRequest(Request):
    """A push target to set.

    Without `secret` an existing target keeps its secret, and a new target gets a generated one.
    """

    url: Annotated[str, Meta(min_length=1, max_length=admin.MOST_URL)]
    group: Name | None = None
    concurrency: Annotated[int, Meta(ge=1, le=admin.MOST_CONCURRENCY)] | None = None
    timeout_ms: PushTimeout | None = None
    secret: str | None = None
    renew_secret: bool = False


class PushTarget(Answer):
    """A push target. Null means the default from the gateway's configuration."""

    group: str
    url: str
    concurrency: int | None
    timeout_ms: int | None


class PushAnswer(PushTarget):
    """A push target; `secret` is included only in the response that generated it."""

    secret: str | UnsetType = UNSET


class PushTargets(Answer):
    """All push targets of a topic."""

    targets: list[PushTarget]


class PushRemoved(Answer):
    """The groups whose push target was removed."""

    removed: list[str]


class PushQuery(Request):
    """The group whose target to remove; by default all groups."""

    group: Name | None = None


@operations.add(
    "GET",
    PATH,
    "The push target of each group that has one.",
    scope=Scope.OPERATE,
    problems=NO_TOPIC,
)
async def list_push_targets(call: Call[NoFields, None]) -> PushTargets:
    """List a topic's push targets."""
    found = await call.gateway.ask(admin.targets, call.topic)
    if not found:
        await require_topic(call.gateway, call.topic)
    return PushTargets(targets=convert(found, list[PushTarget], from_attributes=True))


@operations.add(
    "PUT",
    PATH,
    {201: "The group has its first push target.", 200: "The push target is restored."},
    scope=Scope.OPERATE,
)
async def set_push_target(call: Call[NoFields, PushRequest]) -> Reply[PushAnswer]:
    """Push a group's messages to a URL.

    Each delivery is sent as a POST, signed according to Standard Webhooks. Without `group`, uses
    the topic's only group and declares it if there is none.
    """
    wanted = call.body
    _check_host(call, wanted.url)
    timeout_ms = wanted.timeout_ms
    stored = await call.gateway.ask(
        admin.set_target,
        call.topic,
        wanted.url,
        group=wanted.group,
        concurrency=wanted.concurrency,
        timeout=None if timeout_ms is None else timedelta(milliseconds=timeout_ms),
        secret=wanted.secret,
        renew_secret=wanted.renew_secret,
    )
    await reload_targets(call.gateway, call.topic)
    shown = convert(stored.target, PushAnswer, from_attributes=True)
    if not stored.is_new_secret:
        shown.secret = UNSET
    return answer(shown, 201 if stored.is_new else 200)


def _check_host(call: Call[NoFields, PushRequest], url: str) -> None:
    """Reject a disallowed literal address; host names are checked when connecting."""
    try:
        allowed_of(call.gateway).check_literal(urlsplit(url).hostname or "")
    except NotAllowed as error:
        raise ErrorResponse(400, "refused", str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{url[:80]!r} is not a valid URL: {error}") from None


@operations.add(
    "DELETE",
    PATH,
    "Pushes in progress finish; other messages wait for consumers.",
    scope=Scope.OPERATE,
    problems={404: "The topic is unknown, or no push target is set."},
)
async def remove_push_target(call: Call[PushQuery, None]) -> PushRemoved:
    """Remove a push target."""
    group = call.query.group
    if group is not None:
        check_group(group)
    removed = await call.gateway.ask(admin.remove, call.topic, group)
    await reload_targets(call.gateway, call.topic)
    if not removed:
        await require_topic(call.gateway, call.topic)
        of = f"group {group!r} of topic" if group else "topic"
        raise ErrorResponse(404, "unknown-push", f"{of} {call.topic!r} has no push target")
    return PushRemoved(removed=removed)
