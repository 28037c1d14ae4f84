"""Makes the paper's training sets from captions and videos with teacher models."""
