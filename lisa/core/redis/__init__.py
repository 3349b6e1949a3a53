"""Access to the server: addresses, clients, connections, failover, errors and back-off."""
