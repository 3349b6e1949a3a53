"""The transitions, one module per Lua script, with the same name.

A transition builds its script call and parses the reply; only `lisa.core.store.runner` runs it. No
code outside this package depends on a script's KEYS and ARGV. A module whose script moves messages
starts with the states before and after, as in "in flight -> settled".
"""
