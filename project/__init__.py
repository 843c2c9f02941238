"""The demo project: a job runner that runs each job at most once at a time over all servers."""
