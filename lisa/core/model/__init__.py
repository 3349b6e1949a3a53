"""The domain: keys, envelopes, messages, options and policies. Imports nothing else from Lisa."""
