"""Videos on disk, and which of them to ask."""
