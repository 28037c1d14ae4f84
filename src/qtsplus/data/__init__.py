"""Data: what the models are trained and tried on."""
