"""`lisa bench`: how fast and how punctual Lisa is here, against raw commands and other queues."""
