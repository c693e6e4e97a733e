"""The run folder as its session writes it: the journal, files, checkpoints that stay, and how a session goes on."""
