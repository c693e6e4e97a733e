"""What becomes of a trial: submitted, started, resized, called, paused, failed, ended."""
