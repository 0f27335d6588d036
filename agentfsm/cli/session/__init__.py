"""Interactive execution of a run in the terminal."""
