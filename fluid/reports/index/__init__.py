"""The page of all runs below a folder, served live, with the page of each run behind it."""
