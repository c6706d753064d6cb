"""The orchestrator: takes requests, runs the rounds, keeps the committed tokens."""
