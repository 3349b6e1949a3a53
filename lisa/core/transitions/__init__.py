"""The transitions: one class for each Lua script, whose name is its `script`.

A transition builds its script call and parses the reply; only `lisa.core.store.store` runs it. No
code outside this package depends on a script's KEYS and ARGV. A module whose script moves messages
starts with the states before and after, as in "in flight -> settled".
"""
