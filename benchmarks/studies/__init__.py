"""What a selection finds in long videos, and what a budget follows."""
