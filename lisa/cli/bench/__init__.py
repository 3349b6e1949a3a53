"""`lisa bench`: measures Lisa's throughput and lateness against raw Redis commands."""
