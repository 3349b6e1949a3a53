"""Numbers for Prometheus: what there is (`families`), where it is read, how it is shown.

`topics` reads what Redis knows of every topic, the same wherever it is asked. A role counts its own
doings in a module of its own (`lisa.manager.metrics` and so on) and gives them as `Numbers`;
`sharing` sums them over the processes of one role, `page` writes them as text.
"""
