"""Recurring messages: cron patterns, their instants, definitions, and what a tick does.

Pure computation. `lisa.core.store.schedules` reads and writes schedules.
"""
