"""The draft service: proposes blocks of tokens with the distributions they were drawn from."""
