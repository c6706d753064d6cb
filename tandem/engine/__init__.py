"""The engine that the draft and the target service share: model, slot cache, sessions, continuous batching."""
