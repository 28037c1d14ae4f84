"""How the tiny models are taught: dense supervision of a base, and Muon, on top of the library's Trainer."""
