"""lmms-eval: our models, and stock ones, behind it, the paper's tasks, runs that resume, and their reports."""
