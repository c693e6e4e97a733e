"""The engine: a state machine without IO that decides what runs where. Events go in, commands come out."""
