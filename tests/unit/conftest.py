"""Here nothing talks to a server or a database, and every run tries the same examples."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
