"""TinyWorld: rendered videos of moving shapes, and all that is asked about them."""
