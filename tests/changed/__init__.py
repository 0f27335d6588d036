"""Programs that are changed under their runs: pairs of them by the thousand, each made of its seed."""
