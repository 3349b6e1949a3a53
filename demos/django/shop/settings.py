"""Settings: what matters here are INSTALLED_APPS, LISA and TASKS."""

import os

SECRET_KEY = "only-for-this-demo"  # noqa: S105
USE_TZ = True
INSTALLED_APPS = ["lisa.django", "lisa.django.outbox", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", "shop.sqlite3"),
        "OPTIONS": {"timeout": 20},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LISA = {"concurrency": 4}  # and "server": "redis://...", or LISA_REDIS_URL
TASKS = {"default": {"BACKEND": "lisa.django.tasks.LisaBackend"}}
