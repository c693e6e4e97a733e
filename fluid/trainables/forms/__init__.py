"""The forms of a trainable, and what runs one in a lane: class, function, generator, trainable of Ray."""
