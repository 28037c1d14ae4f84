"""From and to the Hub: converting and splitting checkpoints, assembling and publishing repositories."""
