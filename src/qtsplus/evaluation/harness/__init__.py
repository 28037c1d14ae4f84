"""The plugin for lmms-eval: our models, and stock ones, behind its chat interface."""
