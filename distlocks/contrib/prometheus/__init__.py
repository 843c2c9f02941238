"""What happens to locks, as Prometheus counts it.

Switched on by "distlocks.contrib.prometheus" in INSTALLED_APPS; needs distlocks[prometheus]. The
alert rules beside this file, alerts.yml, go with it.
"""
