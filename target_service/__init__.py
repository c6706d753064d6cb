"""The target service: scores blocks of draft tokens, each in one forward pass."""
