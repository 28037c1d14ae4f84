"""Everything that a Hub repository carries, flat; relative imports only."""
