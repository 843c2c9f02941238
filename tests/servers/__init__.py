"""Real servers for the tests, all on loopback, started once per run and always ended.

A further server is one subclass of `base.Server` (see `postgres.py`), named in `session.KINDS`, or
in `session.ON_DEMAND` if few tests need it.
"""
