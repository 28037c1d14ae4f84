"""lmms-eval: its plugin for our models, the paper's tasks, runs that resume, and their reports."""
