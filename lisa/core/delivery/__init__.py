"""The steps of delivery, shared by consumer threads, `Consumer.pull`, long polls and pushes.

group_resolution: join a group, wait for one, and tell a removed group from a lost one.
opening: read the bodies of entries, by plain reads where these suffice, and decode them.
pace: how far to read ahead, and when to take one message at a time.
source: pull, open, settle what no handler may see, and wait for more.
"""
