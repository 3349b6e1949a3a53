"""The transitions: one module for each Lua script, same name.

A transition builds its call and reads the reply; only `lisa.core.runner` runs it. Nothing outside
this package knows a script's KEYS and ARGV.
"""
