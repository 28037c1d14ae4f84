"""A base whose language model someone else pretrained: it learns to see drawings of real things over filmed footage."""
