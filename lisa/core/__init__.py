"""What all roles share, and nothing else. It imports nothing of Lisa's but itself."""
