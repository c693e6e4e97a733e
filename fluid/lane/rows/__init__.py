"""Several trials of one lane at once: groups that are stepped together, and packs that are fused."""
