"""The Django app."""

from __future__ import annotations

from django.apps import AppConfig


class LisaConfig(AppConfig):  # type: ignore[misc]
    """Adds the command `lisa_consumer`; has no models."""

    name = "lisa.django"
    label = "lisa"
