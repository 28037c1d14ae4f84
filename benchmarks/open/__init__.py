"""How a trained selector does in the world without a grid: its budget, its choice, and what it says of nothing."""
