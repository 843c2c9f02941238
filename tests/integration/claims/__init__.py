"""Claims of every kind against a plain reference, step by step and in a crowd of processes."""
