"""The device of a lane: its memory, how busy it is, how it is warmed up."""
