"""The gateway: Lisa over HTTP, for every language.

One process of it is a `Hub`, on which the faces stand: the native API (`native`), the wire formats
of earlier systems (`compat`), pushes to web hooks (`push`), metrics, and the web page (`page`).
Needs the extra `gateway`.
"""
