"""Migrations; tables have the names of the setting LISA_OUTBOX."""
