"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig


class LisaOutboxConfig(AppConfig):  # type: ignore[misc]
    """The tables of outbox and inbox, and the command `lisa_relay`."""

    name = "lisa.django.outbox"
    label = "lisa_outbox"
    verbose_name = "Lisa outbox"
