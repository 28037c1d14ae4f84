"""The laboratory: rendered worlds, how the tiny models are taught, and what is measured. No wheel carries it.

`python -m benchmarks` in a clone lists its commands. It imports the library, and the library never imports it.
"""
