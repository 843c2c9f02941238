"""The locks on Redis beside their peers, and beside what Redis itself takes."""
