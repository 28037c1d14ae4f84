"""From a question to an answer with its evidence."""
