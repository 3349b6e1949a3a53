"""What the actions of the page consist of: a posted form, a verb, and what it did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.responses import Response

from lisa.core.model.keys import check_id
from lisa.gateway.access import Scope
from lisa.gateway.page.view_context import PageRequest


@dataclass(frozen=True, slots=True)
class FormAction:
    """A posted form: the action and the messages it applies to."""

    visit: PageRequest
    topic: str
    verb: str
    picked: tuple[tuple[str, str], ...]
    fields: dict[str, str] = field(default_factory=dict)

    def id(self) -> str:
        """The id of the message to act on. Raises InvalidMessage."""
        return check_id(self.fields.get("id", ""))


class Done(NamedTuple):
    """The result of an action; `back` is the page to show instead of the form's."""

    did: str
    n: int | str = ""
    of: int | str = ""
    back: str = ""


class Verb(NamedTuple):
    """An action: the scope that it requires, its work, and how it asks for confirmation.

    work: returns what it did, or a page to show because it did nothing. warning: the text of the
    page that asks for confirmation; None runs the action immediately. asks: what the action applies
    to and how many, such as ("5 messages", 5); by default the form's messages.
    """

    scope: Scope
    work: Callable[[FormAction], Awaitable[Done | Response]]
    name: str = ""
    warning: str | None = None
    asks: Callable[[FormAction], Awaitable[tuple[str, int]]] | None = None
