"""Infrastructure of every daemon: service threads, status server, child processes and logs."""
