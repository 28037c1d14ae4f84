"""Runs of lmms-eval: the paper's tasks, runs that resume, and their reports."""
