"""What happened to a trial, and why, in words."""
