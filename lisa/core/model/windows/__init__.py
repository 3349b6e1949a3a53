"""Local due times, and windows: the hours in which messages may be handed over.

Pure computation. Producers use it to choose due times, consumers to check them at hand-over.
"""
