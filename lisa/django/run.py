"""What `manage.py lisa_consumer` runs: the handlers of all apps, and the enqueued tasks."""

from __future__ import annotations

import django
from django.apps import apps
from django.conf import settings
from django.utils.module_loading import autodiscover_modules

if not apps.ready:
    django.setup()

from lisa.django import consumer

autodiscover_modules("handlers")
if getattr(settings, "TASKS", None):
    from lisa.django.tasks import handle_tasks

    handle_tasks(consumer)
