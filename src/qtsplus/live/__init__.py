"""Streams, their sources and memory, and standing questions."""
