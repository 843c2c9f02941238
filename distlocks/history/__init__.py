"""What has happened to locks: kept for operators, in tables, off the path of every lock."""
