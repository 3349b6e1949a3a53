"""Code shared by all roles. Imports nothing from Lisa outside core."""
