"""How the lanes of one host share its GPUs."""
