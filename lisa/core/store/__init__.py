"""Queries and operations on topics, written as flows and run blocking or with asyncio."""
