"""Trainers of Ray Train inside a trial: they train in its lane."""
