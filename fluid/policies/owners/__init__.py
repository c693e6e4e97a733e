"""Groups of several owners on the same devices: whose turn it is, and which devices change hands."""
