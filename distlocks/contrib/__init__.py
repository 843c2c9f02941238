"""Bridges to what projects use beside distlocks. Each imports its own client, and nobody else's."""
