"""How often a model answers as the records say."""
