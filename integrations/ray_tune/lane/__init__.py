"""A trial of Tune in a lane: its trainable, its checkpoints, and how it is rehearsed."""
