"""Create the tables of outbox and inbox, with the names of the setting LISA_OUTBOX."""

from __future__ import annotations

from django.db import migrations, models

from lisa.django.outbox.models import EXPIRES_INDEX, ID_HASH_INDEX, NAMES, DigestField


class Migration(migrations.Migration):  # type: ignore[misc]
    """Both tables."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="OutboxOperation",
            fields=[
                ("seq", models.BigAutoField(primary_key=True, serialize=False)),
                ("id_hash", models.BigIntegerField()),
                ("created_ms", models.BigIntegerField()),
                ("try_ms", models.BigIntegerField(db_default=0, null=True)),
                ("reason", models.TextField(null=True)),
                ("operation", models.CharField(max_length=1)),
                ("topic", models.CharField(max_length=128)),
                ("message_id", models.CharField(max_length=513)),
                ("token", models.CharField(max_length=8)),
                ("due", models.CharField(max_length=64)),
                ("options", models.TextField(null=True)),
                ("envelope", models.BinaryField(null=True)),
            ],
            options={
                "db_table": NAMES["outbox"],
                "indexes": [models.Index(fields=["id_hash", "seq"], name=ID_HASH_INDEX)],
            },
        ),
        migrations.CreateModel(
            name="HandledDelivery",
            fields=[
                ("digest", DigestField(primary_key=True, serialize=False)),
                ("expires_ms", models.BigIntegerField()),
            ],
            options={
                "db_table": NAMES["inbox"],
                "indexes": [models.Index(fields=["expires_ms"], name=EXPIRES_INDEX)],
            },
        ),
    )
