"""The options of a consumer, and which topics it reads for which groups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lisa.consumer.lifespan import Lifespan
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import DEFAULT_PREFIX, Keys, check_group
from lisa.core.model.middleware import BaseMiddleware, load
from lisa.core.model.options import GRACE
from lisa.core.model.sharding import Topic
from lisa.core.redis.address import Address

if TYPE_CHECKING:
    from lisa.core.settings import ConsumerSettings

LARGEST_CONCURRENCY = 10_000
LARGEST_BATCH = 1_000_000


class WantedTopic(NamedTuple):
    """A topic to read, its group if given, and the prefix of the consumer's name if given."""

    topic: Topic
    group: str | None
    name: str | None


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """See `Consumer` for the meaning of each option.

    configured, configured_middleware: the topics and the middleware that the settings name.
    in_code: which of `address` and `keys` the program gave to the constructor.
    """

    address: Address
    keys: Keys = field(default_factory=lambda: Keys(DEFAULT_PREFIX))
    group: str | None = None
    name: str | None = None
    concurrency: int = 1
    poll_timeout: timedelta = timedelta(seconds=5)
    poll_batch_size: int | None = None
    grace: timedelta = GRACE
    lifespan: Lifespan | None = None
    middleware: tuple[BaseMiddleware, ...] = ()
    configured_middleware: tuple[BaseMiddleware, ...] = ()
    configured: Collection[WantedTopic] = ()
    in_code: Collection[str] = ()

    def checked(self) -> Self:
        """These options. Raises ConfigError if one is invalid."""
        if self.group is not None and self.group is not (plain := check_group(self.group)):
            return replace(self, group=plain).checked()
        name = self.name
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                f"name={name!r} is not a non-empty string; omit name to use a generated one"
            )
        _check_whole("concurrency", self.concurrency, LARGEST_CONCURRENCY)
        if self.lifespan is not None and not callable(self.lifespan):
            raise ConfigError(
                f"lifespan={self.lifespan!r} is not a function that returns a context manager"
            )
        if self.poll_timeout < timedelta(milliseconds=1):
            raise ConfigError("poll_timeout must be at least 1 ms")
        if self.poll_batch_size is not None:
            _check_whole("poll_batch_size", self.poll_batch_size, LARGEST_BATCH)
        return self

    def with_settings(self, settings: ConsumerSettings, flags: Collection[str] | None) -> Self:
        """These options with settings applied; see `Consumer.configure`."""
        server, only_given = settings.consumer_server, flags is not None
        given = settings.model_fields_set if only_given else type(settings).model_fields
        inner = server.model_fields_set if only_given else type(server).model_fields
        changes: dict[str, Any] = {
            name: getattr(server, name)
            for name in ("concurrency", "poll_batch_size", "grace")
            if name in inner
        }
        kept = {
            name
            for name, flag in (("address", "redis"), ("keys", "prefix"))
            if flags is not None and name in self.in_code and flag not in flags
        }
        if "address" not in kept and (not only_given or settings.redis.model_fields_set):
            changes["address"] = Address.from_settings(settings.redis)
        if "keys" not in kept and "prefix" in given:
            changes["keys"] = Keys(settings.prefix)
        if "middleware" in given:
            changes["configured_middleware"] = tuple(load(settings.middleware))
        if "poll_timeout_millis" in inner:
            changes["poll_timeout"] = timedelta(milliseconds=server.poll_timeout_millis)
        wanted = [
            WantedTopic(Topic(group.topic), group.group, group.consumer)
            for group in settings.groups
        ]
        return replace(self, **changes, configured=wanted)

    def without(self, topic: str) -> Self:
        """These options without a configured topic."""
        return replace(
            self, configured=[wanted for wanted in self.configured if wanted.topic != topic]
        )

    def wanted_for(self, topic: str) -> list[WantedTopic]:
        """What to read of a topic: for each configured group, or for the consumer's group."""
        found = [wanted for wanted in self.configured if wanted.topic == topic]
        if self.group is not None:
            found = [WantedTopic(Topic(topic), self.group, found[0].name if found else None)]
        return found or [WantedTopic(Topic(topic), None, None)]


def _check_whole(name: str, value: object, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise ConfigError(f"{name}={value!r} is not a whole number from 1 to {highest}")
