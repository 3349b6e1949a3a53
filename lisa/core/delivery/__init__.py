"""The steps of delivery, shared by consumer threads, `Consumer.pull`, long polls and pushes.

group_resolution: join a group, wait for one, and tell a removed group from a lost one.
opening: read the bodies of entries, by plain reads where these suffice.
source: pull, open, settle what no handler may see, and wait for more.
decode, body_size: turn opened entries into messages, within a limit of bytes.
degradation: take one message at a time after many failures.
"""
