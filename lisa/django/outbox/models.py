"""The tables that `lisa.outbox.tables` describes, as models. Write to them by `outbox.send`."""

from __future__ import annotations

from typing import Any

from django.db import models

from lisa.django.outbox import table_names

NAMES = table_names()
ID_HASH_INDEX = f"{NAMES['outbox'][:22]}_id_hash"  # Django takes 30 characters
EXPIRES_INDEX = f"{NAMES['inbox'][:19]}_expires_ms"


class DigestField(models.BinaryField):  # type: ignore[misc]
    """16 bytes, in a type that MySQL and MariaDB take for a primary key."""

    def db_type(self, connection: Any) -> str | None:
        """The type of the column."""
        if connection.vendor == "mysql":
            return "binary(16)"
        found: str | None = super().db_type(connection)
        return found


class OutboxOperation(models.Model):  # type: ignore[misc]
    """An operation that waits for a relay."""

    seq = models.BigAutoField(primary_key=True)
    id_hash = models.BigIntegerField()
    created_ms = models.BigIntegerField()
    try_ms = models.BigIntegerField(null=True, db_default=0)
    reason = models.TextField(null=True)
    operation = models.CharField(max_length=1)
    topic = models.CharField(max_length=128)
    message_id = models.CharField(max_length=513)
    token = models.CharField(max_length=8)
    due = models.CharField(max_length=64)
    options = models.TextField(null=True)
    envelope = models.BinaryField(null=True)

    class Meta:
        """The table."""

        db_table = NAMES["outbox"]
        indexes = (models.Index(fields=["id_hash", "seq"], name=ID_HASH_INDEX),)


class HandledDelivery(models.Model):  # type: ignore[misc]
    """A delivery that a handler with `once_in` has handled."""

    digest = DigestField(primary_key=True)
    expires_ms = models.BigIntegerField()

    class Meta:
        """The table."""

        db_table = NAMES["inbox"]
        indexes = (models.Index(fields=["expires_ms"], name=EXPIRES_INDEX),)
