"""The only place where things happen: what `run.effect` says is done here, and nowhere else."""
