"""A warm Spark session: `lisa pipeline serve` keeps one, and commands run in it.

    protocol.py   the socket, and the messages on it
    client.py     a command: asks the server, passes signals on, returns the exit code
    serving.py    the server: accepts commands, and forks a process for each
    commands.py   the states of the server's commands
    keeper.py     the server's child that owns the JVM; opens a gateway for each command
    daemon.py     forks Spark's Python workers, with Lisa's modules imported
    attached.py   a command's process: takes over the client's surroundings, connects to the JVM

The server's own process has no connection to the JVM and no threads, so that it can fork. A
command's process has the client's working directory, environment, and standard streams; its
gateway to the JVM is its own, and ends with it.
"""
