"""What the locks cost, counted rather than timed: the same on every machine."""
