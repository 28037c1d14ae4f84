"""Streams, their sources and their memory."""
