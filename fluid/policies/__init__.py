"""The engine's features, each a part that its core does not name."""
